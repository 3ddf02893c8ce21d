"""One rank of an elastic job: the recipe as it is, and beside it the proof that every restore was exact.

    torchrun ... tests/elastic_rank.py FOLDER FLAG...

Before the checkpointer sees a step, the whole job is gathered by plain TorchRec code (the demo's) and kept in FOLDER:
so a marker that is committed has its truth on file. After every restore the job is gathered again and compared bit by
bit, and a line of what was found goes into FOLDER/proofs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchrec_stream_ckpt.recipes import proof
from torchrec_stream_ckpt.recipes.demo import use_randomness

MARKER_EVERY = 4
REST_S = 0.02  # after each step: it trains on while nodes come and go, and others need the machine
TRUTHS_KEPT = 100  # steps: many more than pass before a marker is committed


def keep_truth(event: Any, folder: Path) -> None:
    """Let the job put itself aside in front of every step of its checkpointer."""
    checkpointer = event.checkpointer
    step_of_checkpointer = checkpointer.step

    def step() -> None:
        number = checkpointer.steps + 1
        truth = proof.gather(event)
        if truth is not None and checkpointer.generation is not None:  # there is none before the first step of all
            path = truth_file(folder, checkpointer.generation, number)
            torch.save(truth, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            truth_file(folder, checkpointer.generation, number - TRUTHS_KEPT).unlink(missing_ok=True)
        step_of_checkpointer()

    checkpointer.step = step


def truth_file(folder: Path, generation: int, step: int) -> Path:
    return folder / f"truth-{generation}-{step}.pt"


def prove(event: Any, folder: Path) -> None:
    """Compare what was restored with the truth of its marker."""
    now = proof.gather(event)
    if now is None:
        return
    restored = event.restored
    found: dict[str, Any] = {"world": dist.get_world_size(), "restored": None}
    if restored is not None:
        truth = torch.load(truth_file(folder, restored.generation, restored.step), weights_only=True)
        gone = {f"random/{rank}" for rank in range(dist.get_world_size(), restored.world)}  # no rank has their state
        truth = {name: value for name, value in truth.items() if name.rpartition("/")[0] not in gone}
        lines = proof.compare(truth, now)
        found |= {"restored": [restored.generation, restored.marker], "step": restored.step, "was": restored.world}
        found |= {"values": {line.part: line.values for line in lines}}
        found |= {"differences": [line.difference for line in lines if line.difference]}
    with (folder / "proofs").open("a") as file:
        file.write(json.dumps(found) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])

    def on_step(event: Any) -> None:
        if event.loss is None:
            prove(event, folder)
            keep_truth(event, folder)
        use_randomness()
        time.sleep(REST_S)

    proof.train([*sys.argv[2:], "--marker_every", str(MARKER_EVERY)], on_step)


if __name__ == "__main__":
    os.nice(5)  # agents and the test see to their clocks first
    main()
