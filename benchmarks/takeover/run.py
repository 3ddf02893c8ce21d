"""Time from the death of all trainer ranks to the first step after it: by a hot spare, and by a plain restart.

    python benchmarks/takeover/run.py [--rows 200000] [--dim 64] [--rounds 3] [--after_s 3] [--out FILE.json]

Two ranks of ``recipes/train_dlrm.py`` train and stream to a folder; two more stand by (``--standby``). Once the spare
has followed a few markers, the trainers get SIGKILL. The spare notices after ``after_s``, fences them, takes over and
trains. Then the spare is killed, too, and two fresh processes restore and train: what a plain restart takes. Neither
time counts how long it takes until somebody notices. All in the page cache, all four ranks on one host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from common import at_least, command_of, fresh_processes, machine, parse, refuse_small_machine, scratch  # noqa: E402

from torchrec_stream_ckpt.script import free_port  # noqa: E402

WORLD = 2
TIMEOUT_S = 300.0


def rank_main(environment: dict[str, str], output: Path, record: Path, flags: list[str]) -> None:
    """One rank; rank 0 notes when it was restored, and when its first step was done."""
    os.environ |= environment
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    from torchrec_stream_ckpt.recipes.proof import StepEvent, train

    def on_step(event: StepEvent) -> None:
        done = 0 if event.restored is None else event.restored.step
        if os.environ["RANK"] == "0" and event.step in (done, done + 1):
            with record.open("a") as file:
                file.write(json.dumps({"step": event.step - done, "time_s": time.time()}) + "\n")

    train(flags, on_step)


class Ranks:
    """The ranks of one job, each a fresh process."""

    def __init__(self, folder: Path, name: str, flags: list[str]) -> None:
        self.record, self.output = folder / f"{name}.jsonl", folder / f"{name}.out"
        self.output.touch()
        port = free_port()
        shared = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ["OMP_NUM_THREADS"] = "1"  # of every rank, before it imports torch
        self.processes = [
            fresh_processes().Process(
                target=rank_main,
                args=({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self.output, self.record, flags),
            )
            for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def said(self, text: str) -> int:
        return self.output.read_text().count(text)

    def markers(self) -> int:
        return self.said("committed (step ")

    def time_of(self, step: int) -> float | None:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        found = [record["time_s"] for record in map(json.loads, lines) if record["step"] == step]
        return found[0] if found else None

    def wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not what():
            if any(process.exitcode is not None for process in self.processes) or time.monotonic() > deadline:
                raise SystemExit(f"a rank ended, or {TIMEOUT_S:.0f} s are over:\n{self.output.read_text()[-3000:]}")
            time.sleep(0.01)

    def kill(self) -> float:
        """SIGKILL; when."""
        now = time.time()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return now


def one_round(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    flags = ["--synthetic", "small", "--num_embeddings", str(args.rows), "--embedding_dim", str(args.dim)]
    flags += ["--dense_arch_layer_sizes", f"64,{args.dim}", "--limit_train_batches", "1000000", "--marker_every", "20"]
    flags += ["--sharding", "row_wise", "--stream_ckpt", f"file://{folder / 'log'}"]
    jobs: list[Ranks] = []
    try:
        trainer = Ranks(folder, "trainer", flags)
        jobs.append(trainer)
        trainer.wait(lambda: trainer.markers() >= 1)
        spare = Ranks(folder, "spare", [*flags, "--standby", str(args.after_s)])
        jobs.append(spare)
        spare.wait(lambda: spare.said("standing by at marker") >= 1)
        seen = trainer.markers()
        trainer.wait(lambda: trainer.markers() >= seen + 3)
        died = trainer.kill()
        spare.wait(lambda: spare.time_of(1) is not None)
        restored, trained = spare.time_of(0), spare.time_of(1)
        assert restored is not None
        assert trained is not None
        spare.wait(lambda: spare.markers() >= 1)
        begin = spare.kill()
        plain = Ranks(folder, "plain", flags)
        jobs.append(plain)
        plain.wait(lambda: plain.time_of(1) is not None)
        back, again = plain.time_of(0), plain.time_of(1)
        assert back is not None
        assert again is not None
    finally:
        for job in jobs:
            job.kill()
    return {
        "spare_to_restored_s": restored - died - args.after_s,
        "spare_to_first_step_s": trained - died - args.after_s,
        "plain_to_restored_s": back - begin,
        "plain_to_first_step_s": again - begin,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=at_least(1), default=200_000, help="of each of 8 tables")
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--after_s", type=float, default=3.0, help="silence after which the spare takes over")
    parser.add_argument("--out", type=Path)
    args = parse(parser, rows=500, dim=8, rounds=1)
    size = 8 * args.rows * (args.dim + 1) * 4
    refuse_small_machine("takeover", args, "four ranks, two logs", memory=(4 << 30) + 4 * size, disk=20 * size)
    rounds = []
    for number in range(args.rounds):
        with scratch("takeover") as folder:
            rounds.append(one_round(args, folder))
        print(
            f"round {number + 1}: " + ", ".join(f"{key} {value:.2f}" for key, value in rounds[-1].items()), flush=True
        )
    medians = {key: round(statistics.median(each[key] for each in rounds), 3) for key in rounds[0]}
    result = {
        "case": "takeover",
        "command": command_of("takeover"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "table_bytes": 8 * args.rows * args.dim * 4,
        "medians": medians,
        "rounds": rounds,
    }
    print(json.dumps(result["medians"], indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
