"""A guided tour in the terminal: train, kill, restore, branch, diff, follow, report. `make try` runs it.

    python scripts/tour.py [--dir tour-run] [--yes]

Each step says what it shows, prints the command, and runs that very command. It takes a few minutes on two cores.
Nothing outside of the folder is touched; the folder stays, so that you can go on by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, TextIO

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
MARK = ".tour"
TRAIN = ("recipes/train_dlrm.py", "--synthetic", "small", "--limit_train_batches", "300", "--marker_every", "25")
MARKERS_WANTED = 3
END_S = 600.0
_SHOWN = ("marker", "done", "Error", "Try:")
"""What a trainer says that the tour shows; all of it is in a file beside the log."""


class TourError(Exception):
    """The tour cannot go on; says why."""


class Trainer(Protocol):
    """Ranks that train."""

    stdout: TextIO
    """What they say; ends with them."""

    def kill(self) -> None:
        """SIGKILL to all ranks; returns once they are gone."""

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Wait until all have left: their exit status, and what they have said since."""


class Torchrun:
    """``torchrun``, with all that it starts."""

    def __init__(self, world: int, script: Path, *arguments: str) -> None:
        words = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", str(world), str(script), *arguments]
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        self._process = subprocess.Popen(
            words,
            env={"OMP_NUM_THREADS": "1", **loopback, **os.environ},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self._process.stdout is not None
        self.stdout: TextIO = self._process.stdout

    def kill(self) -> None:
        """The ranks are the children of ``torchrun``, which ends once they are gone."""
        ranks = _children(self._process.pid)
        print(f"$ kill -9 {' '.join(map(str, ranks))}", flush=True)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def end(self, timeout_s: float) -> tuple[int, str]:
        """As :class:`Trainer` says; late ones are killed."""
        try:
            said, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TourError(f"the trainer did not end within {timeout_s:.0f} s") from None
        return self._process.returncode, said


def _children(pid: int) -> list[int]:
    said = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [int(each) for each in said.split()]


def stream_ckpt(arguments: Sequence[str]) -> str:
    """What ``stream-ckpt`` prints; of JSON that alone.

    Raises:
        TourError: it failed.
    """
    words = [sys.executable, "-m", "torchrec_stream_ckpt", *arguments]
    done = subprocess.run(words, cwd=Path.cwd(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise TourError(f"stream-ckpt {arguments[0]} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout if "--json" in arguments else done.stderr + done.stdout


class Tour:
    """The steps, in their order.

    Args:
        folder: Where log and report go.
        launch: Starts ranks.
        tool: Runs ``stream-ckpt``.
        more: Flags that every trainer gets besides.
        pause: Called between two steps.
    """

    def __init__(
        self,
        folder: Path,
        launch: Callable[..., Trainer] = Torchrun,
        tool: Callable[[Sequence[str]], str] = stream_ckpt,
        more: Sequence[str] = (),
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._uri = f"file://{folder}/job"
        self._launch, self._tool, self._more, self._pause = launch, tool, tuple(more), pause
        self._number = 0

    def run(self) -> None:
        """All steps.

        Raises:
            TourError: one has failed.
        """
        self._say_step("Train on two ranks, and kill them", "Rows that a step changes go into a log, with markers.")
        self._train_and_kill()
        self._say_step("Look", "A marker is one step of the whole job. What was sent after the last one is in none.")
        self._show("list", self._uri)
        self._say_step("Restore on three ranks", "The same command: other ranks, another sharding plan, the same bits.")
        self._train(3)
        self._say_step("Branch", "Any marker comes back, not only the newest. What follows it is a branch of its own.")
        self._train(2, "--restore", "1:1")
        self._show("list", self._uri, "--tree")
        self._say_step("Compare", "The ends of both branches: the rows that differ, bit by bit, table by table.")
        self._show("diff", self._uri, self._newest(2), self._newest(3))
        self._say_step("Follow", "A replica loads the newest marker, then reads only what changes. It needs no torch.")
        self._show("follow", self._uri, "--once")
        self._say_step("Report", "One page without scripts: markers over time, the branches, rows and bytes by table.")
        self._show("report", self._uri, "--out", f"{self._folder}/report.html")
        print(f"\nThat was the tour. Open {self._folder}/report.html, or go on by hand: docs/tutorial.md.")

    def _say_step(self, title: str, text: str) -> None:
        if self._number:
            self._pause()
        self._number += 1
        print(f"\n== {self._number}. {title}\n{text}\n", flush=True)

    def _show(self, *arguments: str) -> None:
        print(f"$ stream-ckpt {shlex.join(arguments)}", flush=True)
        print(self._tool(arguments).rstrip(), flush=True)

    def _start(self, world: int, *arguments: str) -> Trainer:
        words = (*TRAIN, "--stream_ckpt", self._uri, *arguments, *self._more)
        print(f"$ torchrun --standalone --nproc_per_node {world} {shlex.join(words)}", flush=True)
        return self._launch(world, ROOT / words[0], *words[1:])

    def _train_and_kill(self) -> None:
        trainer = self._start(2, "--epochs", "100")
        seen = 0
        try:
            for line in self._lines(trainer):
                seen += " committed (" in line
                if seen == MARKERS_WANTED:
                    break
        finally:
            trainer.kill()
        if seen < MARKERS_WANTED:
            raise TourError(f"the trainer ended by itself, see {self._folder}/train.log")

    def _train(self, world: int, *arguments: str) -> None:
        trainer = self._start(world, *arguments)
        try:
            for _ in self._lines(trainer):
                pass
        except BaseException:
            trainer.kill()
            raise
        code, _ = trainer.end(END_S)
        if code:
            raise TourError(f"the trainer ended with {code}, see {self._folder}/train.log")

    def _lines(self, trainer: Trainer) -> Iterator[str]:
        """What it says, as it comes; of all that, what is worth showing is printed."""
        with (self._folder / "train.log").open("a") as file:
            for line in trainer.stdout:
                file.write(line)
                if any(word in line for word in _SHOWN):
                    print(f"  {line.rstrip()}", flush=True)
                yield line

    def _newest(self, generation: int) -> str:
        markers = json.loads(self._tool(["list", self._uri, "--json"]))["markers"]
        found = [str(each["marker"]) for each in markers if each["generation"] == generation]
        if not found:
            raise TourError(f"generation {generation} has no marker, see {self._folder}/train.log")
        return found[-1]


def _wait_for_enter() -> None:
    input("\n-- Enter to go on, Ctrl-C to end --")


def main() -> int:
    """The tour, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("tour-run"), help="folder for it (default: %(default)s)")
    parser.add_argument("--yes", action="store_true", help="do not wait for Enter between steps")
    args = parser.parse_args()
    folder = args.dir.absolute()
    if folder.exists():
        if not (folder / MARK).exists():
            parser.error(f"{folder} exists and is no folder of the tour: name another one with --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    started = time.monotonic()
    try:
        Tour(folder, pause=_wait_for_enter if sys.stdin.isatty() and not args.yes else lambda: None).run()
    except TourError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"It took {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
