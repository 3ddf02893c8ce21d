"""Kill a job again and again, and compare what it has computed, bit for bit, with a run that was never killed.

    python benchmarks/proof/run.py [--kills 60] [--peer-kills 6] [--minutes 60] [--folder DIR] [--out FILE.json]

Two ranks of ``recipes/train_dlrm.py`` (clicks like Criteo's, 26 tables, four kinds of sharding) train and stream to a
folder while a materializer folds the log. At random moments, a quarter of them while the job starts or restores, one
rank, both ranks or the materializer get SIGKILL, and start again. The same job under ``torch.save``,
``dcp.async_save``, and ModelDeltaTracker with DCP is killed by the same clock. Each rank writes the loss of each step
down. In the end every loss of every attempt, and the whole job (tables, optimizer states, dense part, random state,
loader), is compared with a run without kills.

It takes hours. ``--folder`` keeps what was done, and the same command goes on there; ``--minutes`` ends it in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
from common import at_least, file_facts, parse, refuse_small_machine, tell  # noqa: E402
from peers import PEERS, peer  # noqa: E402
from ranks import (  # noqa: E402
    LOADED,
    STOPS,
    TIMEOUT_S,
    WORLD,
    Processes,
    StuckError,
    job_flags,
    last_step,
    loads,
    losses,
    ours,
    write_whole,
)

from torchrec_stream_ckpt.extras.broker.kraft import Broker  # noqa: E402
from torchrec_stream_ckpt.recipes.proof import differ  # noqa: E402

OURS, REFERENCE = "ours", "never killed"
EARLY = 0.25
"""Share of the kills that do not wait until the job has loaded."""


BROKER = "broker"


def fold(uri: str, store: list[str]) -> None:
    """(process) Fold the log into its store until it is killed."""
    from torchrec_stream_ckpt.cli.main import main

    sys.argv = ["stream-ckpt", "materialize", uri, *store, "--poll-s", "0.2", "--engine", "local:1"]
    main()


class KilledBroker:
    """A broker on loopback that goes on in its folder after each SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._broker = Broker(folder / BROKER)
        self.uri = self._broker.start(die_with=os.getpid()).uri("proof")

    def kill(self, away_s: float) -> None:
        pid = self._broker.status().pid
        if pid is None:
            raise StuckError("the broker has ended by itself")
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT_S
        while self._broker.status().running:
            if time.monotonic() > deadline:
                raise StuckError(f"the broker outlives SIGKILL by {TIMEOUT_S:g} s")
            time.sleep(0.01)
        time.sleep(away_s)
        self._broker.start(die_with=os.getpid())

    def stop(self) -> None:
        self._broker.stop()


class Killed:
    """One variant under kills; its folder holds all that another call needs to go on."""

    def __init__(self, folder: Path, name: str, flags: list[str], wanted: int, args: argparse.Namespace) -> None:
        self.folder, self.name, self.flags, self.wanted = folder, name, flags, wanted
        self.mean_s, self.ahead = args.mean_s, args.ahead
        folder.mkdir(exist_ok=True)
        self._state = folder / "state.json"
        self.broker: KilledBroker | None = None
        self._kafka = args.log == "kafka" and name == OURS
        self.kills: dict[str, int] = {}
        self.seconds = 0.0
        if self._state.exists():
            kept = json.loads(self._state.read_text())
            self.kills, self.seconds = kept["kills"], kept["seconds"]

    @property
    def uri(self) -> str:
        return self.broker.uri if self.broker is not None else f"file://{self.folder / 'log'}"

    @property
    def _store(self) -> list[str]:
        """Where a log over Kafka has its store; a file log has its own."""
        return ["--store", f"file://{self.folder / 'store'}"] if self._kafka else []

    def _ranks(self) -> Processes:
        if self.name == OURS:
            flags = [*self.flags, "--stream_ckpt", self.uri, *self._store, "--marker_every", "5"]
            return Processes(self.folder, "ranks", WORLD, ours, flags, self.folder)
        return Processes(self.folder, "ranks", WORLD, peer, self.flags, self.folder, self.name)

    def run(self, deadline: float) -> bool:
        """Until it has had its kills and has ended, or until ``deadline``; whether it has ended.

        Raises:
            StuckError: the job, or the materializer, does not go on by itself.
        """
        if self._kafka and not self._ended():
            self.broker = KilledBroker(self.folder)
        begin = time.monotonic() - self.seconds
        ranks: Processes | None = None
        service: Processes | None = None
        seen = 0
        """Times that it had loaded when these ranks started."""
        try:
            while not self._ended():
                if time.monotonic() > deadline:
                    return False
                begun = bool(loads(self.folder)) if self._kafka else (self.folder / "log").exists()
                if self.name == OURS and service is None and begun:
                    service = Processes(self.folder, "materializer", 1, fold, self.uri, self._store)
                if ranks is None:
                    seen, ranks = len(loads(self.folder)), self._ranks()
                done = sum(self.kills.values())
                if done >= self.wanted:
                    self._decide_stop(ranks)
                    self.seconds = time.monotonic() - begin
                    continue
                chance, of_broker = random.Random(done), self.broker is not None and done % 2
                if chance.random() >= EARLY or of_broker:  # a job refuses to start without its broker
                    ranks.wait(lambda seen=seen: len(loads(self.folder)) > seen)  # type: ignore[misc]
                    time.sleep(chance.uniform(0, 2 * self.mean_s))
                else:
                    time.sleep(chance.uniform(0, 2.0))
                ranks.wait(lambda: True)
                if service is not None:
                    service.wait(lambda: True)
                victim = chance.choices(["one rank", "both ranks", "materializer"], [0.6, 0.2, 0.2])[0]
                if self.broker is not None and of_broker:
                    victim = BROKER
                    self.broker.kill(away_s=chance.uniform(0, 2))
                elif victim == "materializer" and service is not None:
                    service.kill()
                    service = None
                elif victim == "one rank":
                    ranks.kill(only=chance.randrange(WORLD))
                    ranks = None
                else:
                    victim = "both ranks"
                    ranks.kill()
                    ranks = None
                self.kills[victim] = self.kills.get(victim, 0) + 1
                self.seconds = time.monotonic() - begin
                write_whole(self._state, json.dumps({"kills": self.kills, "seconds": self.seconds}))
                if (done + 1) % 10 == 0:
                    tell(f"{self.name}: {done + 1} of {self.wanted} kills, step {last_step(self.folder)}")
            write_whole(self._state, json.dumps({"kills": self.kills, "seconds": self.seconds}))
            return True
        finally:
            for each in (ranks, service):
                if each is not None:
                    each.kill()
            if self.broker is not None:
                self.broker.stop()

    def _decide_stop(self, ranks: Processes) -> None:
        """Tell the ranks where to end, and wait for that."""
        if not (self.folder / STOPS).exists():
            ranks.wait(lambda: bool(loads(self.folder)) and last_step(self.folder) > 0)
            furthest = max((step for step, _ in losses(self.folder, 0)), default=0)
            write_whole(self.folder / STOPS, json.dumps([furthest + self.ahead]))
        ranks.wait(lambda: self._ended() and not any(code is None for code in ranks.codes))

    @property
    def stop(self) -> int:
        """The step that it ended at."""
        return int(json.loads((self.folder / STOPS).read_text())[-1])

    def _ended(self) -> bool:
        return (self.folder / STOPS).exists() and (self.folder / f"whole-{self.stop}.pt").exists()

    def report(self, reference: Path) -> dict[str, Any]:
        """What was lost, and what differs from the run without kills."""
        trained = [losses(self.folder, rank) for rank in range(WORLD)]
        truth = [dict(losses(reference, rank)) for rank in range(WORLD)]
        wrong = sum(truth[rank][step] != bits for rank in range(WORLD) for step, bits in trained[rank])
        whole = torch.load(reference / f"whole-{self.stop}.pt", weights_only=True)
        now = torch.load(self.folder / f"whole-{self.stop}.pt", weights_only=True)
        names = sorted(whole.keys() | now.keys())
        differing = [name for name in names if differ(whole.get(name), now.get(name))]
        rows = sum(
            int((whole[name] != now[name]).reshape(len(whole[name]), -1).any(1).sum())
            for name in differing
            if name.startswith(("table/", "fused optimizer/")) and whole[name].shape == now[name].shape
        )
        return {
            "kills": self.kills,
            "steps": self.stop,
            "starts that loaded": len(loads(self.folder)),
            "steps trained again": len(trained[0]) - self.stop,
            "losses compared": sum(map(len, trained)),
            "losses that differ": wrong,
            "tensors compared": len(names),
            "tensors that differ": len(differing),
            "rows lost or stale": rows,
            "seconds": round(self.seconds, 1),
        }


def never_killed(folder: Path, flags: list[str], wanted: list[int]) -> float:
    """Train to the last stop in one go, saving nothing; seconds of its steps."""
    if not all((folder / f"whole-{step}.pt").exists() for step in wanted):
        folder.mkdir(exist_ok=True)
        for old in (*folder.glob("losses-*.bin"), folder / LOADED):
            old.unlink(missing_ok=True)
        write_whole(folder / STOPS, json.dumps(wanted))
        ranks = Processes(folder, "ranks", WORLD, peer, flags, folder, "none")
        try:
            ranks.wait(lambda: bool(loads(folder)))
            begin = time.monotonic()
            while any(code is None for code in ranks.codes):
                at = last_step(folder)
                ranks.wait(lambda at=at: last_step(folder) > at or None not in ranks.codes)  # type: ignore[misc]
            seconds = time.monotonic() - begin
        finally:
            ranks.kill()
        write_whole(folder / "seconds.json", json.dumps(seconds))
    return float(json.loads((folder / "seconds.json").read_text()))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    flags = job_flags(args.rows)
    deadline = time.monotonic() + 60 * args.minutes
    wanted = {OURS: args.kills, **dict.fromkeys(PEERS, args.peer_kills)}
    runs = {
        name: Killed(folder / name.replace(" ", "-"), name, flags, number, args)
        for name, number in wanted.items()
        if number
    }
    unfinished = [name for name, run in runs.items() if not run.run(deadline)]
    if unfinished:
        said = {name: f"{sum(run.kills.values())} of {run.wanted} kills" for name, run in runs.items()}
        raise SystemExit(
            f"proof: not finished after {args.minutes:g} minutes: {said}. Run it again with --folder {folder}"
        )
    stops = sorted({run.stop for run in runs.values()})
    seconds = never_killed(folder / "reference", flags, stops)
    found = {name: run.report(folder / "reference") for name, run in runs.items()}
    return {"a step never killed, ms": round(1e3 * seconds / stops[-1], 2), "variants": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=at_least(1), default=60, help="of our job")
    parser.add_argument("--peer-kills", type=at_least(0), default=6, help="of each of the others; 0: none of them")
    parser.add_argument("--rows", type=at_least(50), default=50_000, help="of the largest of 26 tables")
    log = "of our job; with kafka, every second kill is that of its broker, which starts again within seconds"
    parser.add_argument("--log", choices=("file", "kafka"), default="file", help=log)
    parser.add_argument("--mean-s", type=float, default=1.5, help="seconds of training between two kills")
    ahead = "steps from the last kill to the end: no rank may pass it before the driver has written it down"
    parser.add_argument("--ahead", type=at_least(50), default=300, help=ahead)
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so many, to go on later")
    parser.add_argument("--folder", type=Path, help="keep what was done there, and go on there")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, kills=2, peer_kills=0, rows=500, mean_s=0.3, ahead=100)
    os.environ["BENCH_START"] = "forkserver"
    refuse_small_machine(
        "proof", args, "five jobs, one after the other", memory=(2 if args.quick else 6) << 30, disk=8 << 30
    )
    kept = args.folder or Path(tempfile.mkdtemp(prefix="proof-", dir=os.environ.get("BENCH_DIR")))
    kept.mkdir(parents=True, exist_ok=True)
    try:
        facts = measure(args, kept)
    except StuckError as error:
        raise SystemExit(f"proof: a job does not go on by itself (in {kept}): {error}") from None
    if args.folder is None:
        shutil.rmtree(kept, ignore_errors=True)
    print(json.dumps(facts, indent=1))
    file_facts("proof", "run.py", args.out, facts)
    mine = facts["variants"][OURS]
    if mine["losses that differ"] or mine["tensors that differ"]:
        raise SystemExit("proof: FAILED: our job differs from the one that was never killed")


if __name__ == "__main__":
    main()
