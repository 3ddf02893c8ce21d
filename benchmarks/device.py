"""Where the job of a case trains: on CPUs, or with ``--device cuda`` on GPUs, one a rank."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

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
