"""Where the job of a case trains: on CPUs, or with ``--device cuda`` on GPUs, one a rank."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

START = os.environ.get("BENCH_START", "spawn")
"""How processes of a benchmark start: anew, or (``forkserver``, tests) from a server that has imported torch once."""
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Of the group that trains. What ranks tell each other beside, such as their times, goes over gloo."""


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=_available, default="cpu", help="cpu, or cuda: a GPU a rank, over NCCL")


def _available(kind: str) -> str:
    if kind not in BACKENDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is neither cpu nor cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch finds no CUDA device here: use a Python with the CUDA stack on a GPU")
    return kind


def start_ranks(function: Callable[..., Any], world: int, *args: Any) -> None:
    """``function(rank, *args)`` on new processes; returns when all have ended."""
    how = os.environ.get("BENCH_START", "spawn")  # ``--quick`` may have changed it
    mp.start_processes(_with_environment, (dict(os.environ), function, *args), nprocs=world, start_method=how)


def _with_environment(rank: int, environment: dict[str, str], function: Callable[..., None], *args: Any) -> None:
    os.environ |= environment
    function(rank, *args)


def join(kind: str, file: Path, rank: int, world: int) -> torch.device:
    """Make this process a rank, on the device that is returned: with GPUs the one of its number."""
    device = _of_rank(kind, rank, world)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group(BACKENDS[kind], init_method=f"file://{file}", rank=rank, world_size=world)
    return device


def _of_rank(kind: str, rank: int, world: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if torch.cuda.device_count() < world:
        raise SystemExit(f"--device cuda: {world} ranks need a GPU each, torch finds {torch.cuda.device_count()}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def finish_queued() -> None:
    """(GPU) Wait for what is queued: a time that ends before that is one of the queue."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
