"""SCR-Exa's restarts: a job that fails every 10 epochs, four times, on the same node (cold) and with four spares (hot).

    python benchmarks/tiers/restarts.py [--part cold hot] [--ranks 2] [--epochs 50] [--steps 10] [--quick]
        [--out FILE.json]

An epoch has ``--steps`` steps and ends with a checkpoint. In the middle of the epoch after every 10th one all ranks get
SIGKILL, and the job goes on by itself from what it has saved. Before the kill they wait for ``--pause_s``, as if
epochs were long, so that a checkpoint has been copied when an error comes.

``torch.save``     cold: each rank has saved its tables and the dense state at the end of each epoch, while training
                   waited. New processes load the newest save that all ranks have
``the same node``  cold: ours with a near and a far folder, of which the far one gets every 10th marker, as in the talk.
                   New processes restore with the near one still there
``a new node``     hot: the same, but the node is lost: its relay is killed and the near folder is deleted. New
                   processes on a spare node restore from the far one
``standing by``    hot: ours with the far log alone, of every marker. Four spares stand by from the beginning; the next
                   of them is told of the failure at once

Point ``to the next step``: from the kill until rank 0 has made the first step after it. Point ``until restored``: of
these, from the call that restores until it returns; for a spare, from the kill. A value is one failure.

Every rank writes down the loss of each step, also of those that it makes again, and at the end a digest of each tensor.
All of them are compared with a run that saves nothing and is never killed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import Measured, Report, arguments, at_least, fresh_processes, parse, scratch, tell  # noqa: E402
from common import refuse_small_machine as refuse  # noqa: E402
from data import zipf_ids  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig, Takeover  # noqa: E402

SAVE, SAME, NEW, SPARES = "torch.save", "the same node", "a new node", "standing by"
PARTS = {"cold": (SAVE, SAME), "hot": (NEW, SPARES)}
TRUTH = "never killed"
FAILURES, EPOCHS = 4, 10
"""A failure after each so many epochs; as many spares as failures."""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of the job."""

    variant: str
    number: int
    kill_at: int
    """Step after which the ranks wait for SIGKILL; 0 for the last attempt."""
    folder: Path

    @property
    def trigger(self) -> Path:
        """Tells a spare that it is time."""
        return self.folder / f"take-over-{self.number}"

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """What a rank has written down: what it has restored, each step, its end."""
        path = self.folder / f"{self.number}-{rank}.jsonl"
        whole = path.read_text().split("\n")[:-1] if path.exists() else []  # without a line that is being written
        return [json.loads(line) for line in whole]


class Rank:
    """(rank) One attempt of a variant."""

    def __init__(self, args: argparse.Namespace, attempt: Attempt) -> None:
        self._args, self._attempt, self._rank = args, attempt, dist.get_rank()
        self._shape = Shape((args.rows,) * args.tables, args.dim)
        self._job: Job = build(self._shape)
        self._out = attempt.folder / f"{attempt.number}-{self._rank}.jsonl"

    def note(self, **line: Any) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps({**line, "time": time.time()}) + "\n")

    def run(self) -> None:
        with ExitStack() as stack:
            begin, after_step, finish = self._hooks(stack)
            self.note(begins=True)
            done = begin()
            self.note(restored=done)
            for step in range(done + 1, self._args.epochs * self._args.steps + 1):
                ids = zipf_ids(self._shape.rows, self._args.batch, 100_000 * self._rank + step)
                loss = self._job.train(ids, self._args.batch)
                after_step(step)
                self.note(step=step, loss=float(loss).hex())
                if step == self._attempt.kill_at:
                    self.note(waits=True, children=list(children()))
                    time.sleep(TIMEOUT_S)
                    raise SystemExit("nobody has killed this rank")
            finish()
        state = {**self._job.tensors, **self._dense()}
        self.note(ended={name: digest(tensor) for name, tensor in sorted(state.items())})

    def _dense(self) -> dict[str, torch.Tensor]:
        return {name: each for name, each in self._job.model.state_dict().items() if not hasattr(each, "local_shards")}

    def _hooks(self, stack: ExitStack) -> tuple[Callable[[], int], Callable[[int], object], Callable[[], object]]:
        """What restores and returns the steps that are done, what comes after each step, and what ends the job."""
        attempt = self._attempt
        if attempt.variant == TRUTH:
            return (lambda: 0), (lambda _: None), (lambda: None)
        if attempt.variant == SAVE:
            return self._load, self._save, (lambda: None)
        far, near = f"file://{attempt.folder}/far", f"file://{attempt.folder}/near"
        tiers = attempt.variant in (SAME, NEW)
        config = StreamConfig(
            uri=(near, far) if tiers else far,
            store=str(attempt.folder / "store"),
            marker_every=self._args.steps,
            outer_every=EPOCHS if tiers else 1,
            head=None,
        )
        checkpointer = stack.enter_context(StreamCheckpointer(self._job.model, self._job.optimizer, config=config))

        def begin() -> int:
            if attempt.variant == SPARES and attempt.number:
                restored = checkpointer.standby(Takeover(after_s=None, trigger=attempt.trigger))
            else:
                restored = checkpointer.restore()
            return restored.step if restored is not None else 0  # a node was lost before anything was copied

        return begin, (lambda _: checkpointer.step()), (lambda: checkpointer.mark().result(TIMEOUT_S))

    def _path(self, epoch: int, rank: int) -> Path:
        return self._attempt.folder / f"epoch-{epoch}-{rank}.pt"

    def _save(self, step: int) -> None:
        epoch, rest = divmod(step, self._args.steps)
        if rest:
            return
        path = self._path(epoch, self._rank)
        with open(path.with_suffix(".tmp"), "wb") as file:
            torch.save({**self._job.tensors, **self._dense()}, file)
            file.flush()
            os.fsync(file.fileno())
        path.with_suffix(".tmp").rename(path)
        dist.barrier()
        self._path(epoch - 1, self._rank).unlink(missing_ok=True)

    def _load(self) -> int:
        epochs, ranks = range(self._args.epochs, 0, -1), range(dist.get_world_size())
        whole = [epoch for epoch in epochs if all(self._path(epoch, rank).exists() for rank in ranks)]
        dist.barrier()
        if not whole:
            return 0
        found = torch.load(self._path(whole[0], self._rank))
        for name, tensor in {**self._job.tensors, **self._dense()}.items():
            tensor.copy_(found[name])
        return whole[0] * self._args.steps


def children() -> Iterator[int]:
    """The processes that this one has started: a relay."""
    for thread in Path("/proc/self/task").iterdir():
        yield from map(int, (thread / "children").read_text().split())


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def rank_main(environment: dict[str, str], rank: int, args: argparse.Namespace, attempt: Attempt) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    group = attempt.folder / f"group-{attempt.number}"
    group.mkdir(exist_ok=True)
    join_group(group, rank, args.ranks)
    Rank(args, attempt).run()
    dist.barrier()
    dist.destroy_process_group()


class Ranks:
    """All ranks of one attempt, as fresh processes."""

    def __init__(self, args: argparse.Namespace, attempt: Attempt) -> None:
        self.attempt, self._count = attempt, args.ranks
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= environment  # of processes that import torch at their start
        self._processes = [
            fresh_processes().Process(target=rank_main, args=(environment, rank, args, attempt))
            for rank in range(args.ranks)
        ]
        for process in self._processes:
            process.start()

    def wait(self, key: str) -> None:
        """Until every rank has written a line with this key."""
        deadline = time.monotonic() + TIMEOUT_S
        while not all(any(key in line for line in self.attempt.lines(rank)) for rank in range(self._count)):
            codes = [process.exitcode for process in self._processes]
            if any(codes) or time.monotonic() > deadline:
                raise SystemExit(f"Error: {self.attempt}: no '{key}', exit codes {codes}")
            time.sleep(0.005)

    def kill(self, *, node: bool = False) -> float:
        """SIGKILL all ranks, with the whole node also what they have started. Returns when."""
        now = time.time()
        for process in self._processes:
            process.kill()
        for line in self.attempt.lines(0) if node else ():
            for child in line.get("children", ()):
                os.kill(child, signal.SIGKILL)
        self.join()
        return now

    def join(self) -> None:
        for process in self._processes:
            process.join()


def failures(args: argparse.Namespace) -> list[int]:
    """Steps after which the job is killed."""
    return [EPOCHS * number * args.steps + args.steps // 2 for number in range(1, FAILURES + 1)]


def run(args: argparse.Namespace, variant: str, folder: Path) -> tuple[list[Attempt], list[float]]:
    """One job to its end: its attempts, and when each failure was."""
    steps = [*(failures(args) if variant != TRUTH else ()), 0]
    attempts = [Attempt(variant, number, step, folder) for number, step in enumerate(steps)]
    running: list[Ranks] = []
    killed: list[float] = []
    try:
        if variant == SPARES:
            running += [Ranks(args, attempt) for attempt in attempts[1:]]
            for spare in running:
                spare.wait("begins")
        for attempt in attempts:
            if variant == SPARES and attempt.number:
                attempt.trigger.touch()
                ranks = running[attempt.number - 1]
            else:
                ranks = Ranks(args, attempt)
                running.append(ranks)
            if attempt.kill_at:
                ranks.wait("waits")
                time.sleep(args.pause_s)
                killed.append(ranks.kill(node=variant == NEW))
                if variant == NEW:
                    shutil.rmtree(folder / "near")
            else:
                ranks.wait("ended")
                ranks.join()
            tell(f"{variant}: attempt {attempt.number + 1} of {len(attempts)}")
    finally:
        for ranks in running:
            ranks.kill()
    return attempts, killed


def waited(attempts: list[Attempt], killed: list[float]) -> tuple[list[float], list[float]]:
    """Of each failure: seconds to the next step, and those until the rows were back."""
    to_step, restored = [], []
    for attempt, when in zip(attempts[1:], killed, strict=True):
        times = [(line, line["time"]) for line in attempt.lines(0)]
        begins, back, first = (next(at for line, at in times if key in line) for key in ("begins", "restored", "step"))
        to_step.append(first - when)
        restored.append(back - max(begins, when))
    return to_step, restored


def compared(args: argparse.Namespace, attempts: list[Attempt], truth: Attempt) -> dict[str, int]:
    """Each loss of each attempt, and the tensors at the end, and those of the run that was never killed."""
    found = dict.fromkeys(("losses compared", "losses that differ", "tensors compared", "tensors that differ"), 0)
    again = -args.epochs * args.steps
    for rank in range(args.ranks):
        wanted = {line["step"]: line["loss"] for line in truth.lines(rank) if "step" in line}
        made = [line for attempt in attempts for line in attempt.lines(rank) if "step" in line]
        if {line["step"] for line in made} != set(wanted):
            raise SystemExit(f"Error: {attempts[0].variant}: rank {rank} lacks steps")
        found["losses compared"] += len(made)
        found["losses that differ"] += sum(line["loss"] != wanted[line["step"]] for line in made)
        ends, own = (each.lines(rank)[-1]["ended"] for each in (truth, attempts[-1]))
        found["tensors compared"] += len(ends)
        found["tensors that differ"] += sum(own.get(name) != value for name, value in ends.items())
        again = len(made) - len(wanted) if rank == 0 else again
    return {"failures": len(attempts) - 1, "steps made again": again, **found}


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--part", choices=tuple(PARTS), nargs="+", default=list(PARTS))
    least = EPOCHS * FAILURES + 1
    parser.add_argument("--epochs", type=at_least(least), default=50, help="one after the last failure at least")
    parser.add_argument("--pause_s", type=float, default=1.0, help="before each kill: for a copy to end")
    sizes = {"ranks": 2, "tables": 4, "rows": 50_000, "dim": 64, "batch": 512, "steps": 10}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(2 if name == "steps" else 1), default=default)
    args = parse(parser, epochs=least, pause_s=0.0, rows=500, dim=8, batch=32, steps=2)
    shape = Shape((args.rows,) * args.tables, args.dim)
    ranks = (FAILURES + 1) * args.ranks
    what = f"{ranks} ranks with the tables, and logs of all epochs"
    streamed = args.epochs * min(args.steps * args.batch * args.tables * args.ranks * 4 * (args.dim + 4), 2 << 40)
    memory, disk = ranks * (3 << 28) + (FAILURES + 2) * shape.table_bytes, (1 << 29) + 3 * shape.table_bytes + streamed
    refuse("tiers", args, what, memory=memory, disk=4 * disk)
    report = Report("tiers", args, script="restarts.py")
    report.facts |= {"ranks": args.ranks, "epochs": args.epochs, "steps an epoch": args.steps}
    variants = [variant for part in args.part for variant in PARTS[part]]
    to_step, restored = Measured(), Measured()
    with scratch("tiers") as base:
        for variant in (TRUTH, *variants):
            (base / variant).mkdir()
        (truth,), _ = run(args, TRUTH, base / TRUTH)
        for variant in variants:
            attempts, killed = run(args, variant, base / variant)
            to_step.times[variant], restored.times[variant] = waited(attempts, killed)
            report.facts[variant] = compared(args, attempts, truth)
            tell(f"{variant}: {report.facts[variant]}")
            differ = sum(number for name, number in report.facts[variant].items() if "differ" in name)
            if variant != SAVE and differ:
                raise SystemExit(f"Error: {variant}: {report.facts[variant]}")
            shutil.rmtree(base / variant)
    report.add("to the next step", to_step, variants[0], unit="s", scale=1)
    report.add("until restored", restored, variants[0], unit="s", scale=1)
    report.finish()


if __name__ == "__main__":
    main()
