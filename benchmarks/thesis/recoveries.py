"""Recoveries of the newest state, each the first load of fresh processes, with the page cache warm and cold."""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cache import STATES
from common import Measured, take_turns
from design import LoadingService, restore
from job import Job, build, first, slowest
from setting import Setting, State, attach, shape_of

from torchrec_stream_ckpt.log.api import open_log
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.maintain.head import HeadWriter
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import open_dense

LOAD, COPY, MAPPED, SERVICE = (
    "torch.load",
    "torch.load + copy",
    "torch.load, mmap + copy",
    "thesis, loading service",
)
FROM = {"log": "ours, log", "store": "ours, store", "head": "ours, HEAD"}
NAMES = (LOAD, COPY, MAPPED, SERVICE, *FROM.values())


def save(job: Job, own: Path) -> None:
    """(all ranks) What ``torch.save`` and the thesis keep of a rank."""
    state = State.of(job)
    if not all(value.isfinite().all() for value in job.tensors.values()):
        raise RuntimeError("training has diverged: no state can be compared with one that is not a number")
    torch.save(job.tensors | state.rest, own / "all.pt")
    torch.save(state.rest, own / "rest.pt")


def fold(uri: str, shared: Path, head: Path) -> None:
    """What a materializer does beside training. A store that has dense state alone stays, to restore from the log."""
    shutil.copytree(shared / "store", shared / "dense")
    log, objects, dense = open_log(uri), open_store(str(shared / "store")), open_dense(str(shared / "store"))
    with ThreadPoolExecutor(2) as pool:
        writer = HeadWriter(head, objects, pool)
        list(Materializer(log, objects, lambda _: dense, pool, head=writer).catch_up(Control(log).refresh()))
    if writer.marker is None:
        raise RuntimeError("HEAD was not written")


def measure(setting: Setting, ranks: int, base: Path, shared: Path, uri: str, head: str) -> dict[str, Measured]:
    """By the state of the page cache; HEAD and the loading service are in memory in both."""
    with contextlib.ExitStack() as stack:
        for rank in range(ranks):
            service = LoadingService(shared / f"rank-{rank}" / "all.pt", Path(head).parent / f"service-{rank}")
            stack.callback(service.close)
        found = {}
        for state in STATES:
            variants = {
                name: partial(first, load, ranks, base, state, [shared], setting, shared, uri, head, name)
                for name in NAMES
            }
            found[state] = take_turns(variants, setting.rounds, warm_up=0)
        return found


def load(setting: Setting, shared: Path, uri: str, head: str, variant: str) -> float:
    """(all ranks) Seconds of one load; then the truth is read, and compared."""
    job, rank = build(shape_of(setting.workload, setting.quick)), dist.get_rank()
    own, state, memory = shared / f"rank-{rank}", State.of(job), job.num_bytes * 5 // 4
    for tensor in job.tensors.values():
        tensor.zero_()
    if variant == LOAD:
        return slowest(lambda: torch.load(own / "all.pt"), memory)
    if variant in (COPY, MAPPED):
        taken = slowest(partial(_copy, job, own / "all.pt", mmap=variant == MAPPED), memory)
    elif variant == SERVICE:
        tables, address = list(state.tables.values()), Path(head).parent / f"service-{rank}"
        taken = slowest(lambda: restore(address, tables, state.rest, own / "rest.pt"), memory)
    else:
        taken = _ours(job, shared, uri, head, variant)
    for key, value in torch.load(own / "all.pt", mmap=True).items():
        if key in job.tensors and not torch.equal(job.tensors[key], value):
            raise RuntimeError(f"{variant}: {key} was restored wrongly")
    return taken


@torch.no_grad()
def _copy(job: Job, path: Path, *, mmap: bool) -> None:
    live = job.tensors | State.of(job).rest
    for key, value in torch.load(path, mmap=mmap).items():
        live[key].copy_(value)


def _ours(job: Job, shared: Path, uri: str, head: str, variant: str) -> float:
    found: list[Any] = []
    source = next(source for source, name in FROM.items() if name == variant)
    store = shared / ("dense" if source == "log" else "store")
    with attach(job, uri, store, head=head if source == "head" else None) as checkpointer:
        taken = slowest(lambda: found.append(checkpointer.restore()), job.num_bytes * 5 // 4)
    if found[0] is None or not found[0].source.startswith(source):
        raise RuntimeError(f"restored {found[0]}, not from the {source}")
    return taken
