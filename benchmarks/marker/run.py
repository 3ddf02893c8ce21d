"""How long one marker keeps training from going on, and what else costs as long: paired, interleaved.

    python benchmarks/marker/run.py [--rows 5000000] [--touched 0.01] [--rounds 5] [--out FILE.json]

One table of 5,000,000 x 64 float32 with row-wise Adagrad, 1.3 GB, one rank. Before each call one step touches 1% of the
rows, none of which has been drained. Timed is the call until it returns, without an fsync of anybody's; then what goes
on after it is waited for. The point ``durable`` has the same variants until the disk has everything, with an fsync of
everybody's.

``ours``                            ``mark()``: 1% of the rows into the ring; the future must resolve to a commit
``ours, without proof``             the same without digests of live rows (``proof_bytes=0``)
``torch.save``                      of the tables and states, all of it before it returns
``dcp.async_save, fresh copy``      plain tensors, ``DefaultStager`` with no option, made anew each time (DCP's default)
``dcp.async_save, kept copy``       the same stager kept: it copies over its last copy
``dcp.async_save, shared, process`` the stager kept, its copy in shared memory, a process of its own that writes
``dcp.async_save, thread stages``   the stager kept, a thread copies; timed until it has, as no row may change before
``torchsnapshot async_take``        of plain tensors

Then once more with twice the table and the same number of touched rows: a marker must not grow with the table.

The point ``digest of the dense state`` is CPU time of one core: the digests that a marker's proof has of 8 MiB, in one
tensor and in a hundred, next to a copy of the same bytes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from cache import files_under  # noqa: E402
from common import (  # noqa: E402
    WITH_FSYNC,
    WITHOUT_FSYNC,
    Goal,
    Measured,
    Report,
    UnavailableError,
    add_fsync,
    arguments,
    at_least,
    check_disk,
    check_memory,
    parse,
    scratch,
    synced,
    take_turns,
    timed,
)
from device import add_device  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse  # noqa: E402

from tests.inside import inside  # noqa: E402
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.dense.dense_digests import digests  # noqa: E402

PLAIN = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
SHARED = replace(PLAIN, use_shared_memory=True)
STAGED = replace(PLAIN, use_async_staging=True)
BY_PROCESS, BY_THREAD = "dcp.async_save, shared, process", "dcp.async_save, thread stages"
OURS, UNPROVED, SAVE, KEPT = "ours", "ours, without proof", "torch.save", "dcp.async_save, kept copy"
FRESH, SNAPSHOT = "dcp.async_save, fresh copy", "torchsnapshot async_take"
DURABLE = "table, durable"
DIGEST, WHOLE, PARTS, COPY = "digest of the dense state", "one tensor", "100 tensors", "copy"
STAGERS = {KEPT: PLAIN, BY_PROCESS: SHARED, BY_THREAD: STAGED}
"""That are kept from marker to marker."""


class Markers:
    """The variants on one job."""

    def __init__(self, job: Job, checkpointer: StreamCheckpointer, touched: int, folder: Path) -> None:
        self._job, self._checkpointer, self._touched, self._folder = job, checkpointer, touched, folder
        self._stagers = {name: DefaultStager(options) for name, options in STAGERS.items()}
        self._ids = torch.randperm(job.shape.rows[0])
        self._at = 0
        self.durable = False
        """Whether the clock goes on until the disk has it."""

    def _timed(self, call: Callable[[], Any], finish: Callable[[Any], object]) -> float:
        """Seconds of ``call``, and of ``finish`` if it is to be durable; the other one is waited for in either case."""
        found: list[Any] = []
        if self.durable:
            return timed(lambda: finish(call()))
        taken = timed(lambda: found.append(call()))
        finish(found[0])
        return taken

    def variants(self) -> dict[str, Callable[[], float]]:
        return {
            OURS: self.ours,
            UNPROVED: self.unproved,
            SAVE: self.save,
            FRESH: lambda: self.dcp(DefaultStager(PLAIN)),
            KEPT: lambda: self.dcp(self._stagers[KEPT]),
            BY_PROCESS: lambda: self.dcp(self._stagers[BY_PROCESS], AsyncCheckpointerType.PROCESS),
            BY_THREAD: lambda: self.dcp(self._stagers[BY_THREAD]),
            SNAPSHOT: self.snapshot,
        }

    def _train(self) -> None:
        """Touch so many rows; what a variant leaves marked, the next one of ours would have to send."""
        if self._at + self._touched > len(self._ids):
            self._at = 0
        ids = self._ids[self._at : self._at + self._touched]
        self._at += self._touched
        self._job.train([ids], bags=len(ids) // 10)
        self._checkpointer.step()

    def ours(self) -> float:
        self._settle()
        self._train()
        return self._timed(self._checkpointer.mark, lambda future: future.result(120))

    def unproved(self) -> float:
        """On the same tables, so that the two differ in nothing else."""
        with inside(self._checkpointer).without_proofs():
            return self.ours()

    def _settle(self) -> None:
        """What other variants have touched goes with a marker that is not timed."""
        self._checkpointer.mark().result(120)

    def save(self) -> float:
        self._train()
        path = self._folder / "tables.pt"
        return self._timed(
            lambda: torch.save(self._job.tensors, path), lambda _: synced(path) if self.durable else None
        )

    def dcp(self, stager: DefaultStager, by: AsyncCheckpointerType = AsyncCheckpointerType.THREAD) -> float:
        self._train()
        path = self._folder / "dcp"
        shutil.rmtree(path, ignore_errors=True)

        def save() -> Any:
            state = dict(self._job.tensors)
            found = dcp.async_save(state, checkpoint_id=path, async_stager=stager, async_checkpointer_type=by)
            if isinstance(found, AsyncSaveResponse):
                found.staging_completion.result()
                found = found.upload_completion
            return found

        return self._timed(save, lambda upload: upload.result())  # DCP syncs its files

    def snapshot(self) -> float:
        try:
            from torchsnapshot import Snapshot, StateDict
        except ImportError as error:
            raise UnavailableError(f"torchsnapshot is not installed ({error})") from None
        self._train()
        path = self._folder / "snapshot"
        shutil.rmtree(path, ignore_errors=True)
        state = {"tables": StateDict(**{name.replace(".", "_"): each for name, each in self._job.tensors.items()})}

        def finish(pending: Any) -> None:
            pending.wait()
            if self.durable:
                for file in files_under(path):
                    synced(file)

        return self._timed(lambda: Snapshot.async_take(str(path), state), finish)


def measure(
    args: argparse.Namespace, rows: int, touched: int, folder: Path, *, durable: bool, only: tuple[str, ...] = ()
) -> Any:
    shape = Shape((rows,), args.dim, device=args.device)
    what = f"a table of {shape.table_bytes / 1e9:.1f} GB and two copies"
    check_memory((1 << 30) + int(3.5 * shape.table_bytes), what)
    check_disk((1 << 28) + 5 * shape.table_bytes, what)
    job = build(shape)
    config = StreamConfig(uri=f"file://{folder}/log", marker_every=None, drain_every=1 << 30, head=None)
    with StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer:
        markers = Markers(job, checkpointer, touched, folder)
        markers.durable = durable
        checkpointer.mark().result(600)  # the base: every row once
        variants = {name: run for name, run in markers.variants().items() if not only or name in only}
        measured = take_turns(variants, args.rounds)
    return measured, job.num_bytes


def measure_digest(num_bytes: int, rounds: int) -> Measured:
    """CPU seconds of one core, warm."""
    whole = torch.randn(num_bytes // 4)
    parts, target = {f"{number}": each for number, each in enumerate(whole.chunk(100))}, torch.empty_like(whole)
    repeats = 20

    def seconds(call: Callable[[], object]) -> float:
        call()
        begin = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - begin) / repeats

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        variants = {
            COPY: lambda: seconds(lambda: target.copy_(whole)),
            WHOLE: lambda: seconds(lambda: digests({"whole": whole})),
            PARTS: lambda: seconds(lambda: digests(parts)),
        }
        return take_turns(variants, rounds)
    finally:
        torch.set_num_threads(threads)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--rows", type=at_least(1), default=5_000_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--touched", type=float, default=0.01, help="share of the rows")
    parser.add_argument("--ours", action="store_true", help="without the other ways: what a proof adds, in a minute")
    parser.add_argument("--digest-mib", type=at_least(1), default=8, help="of the dense state whose digest is timed")
    add_device(parser)
    add_fsync(parser)
    args = parse(parser, rows=10_000, dim=8, rounds=1, digest_mib=1)
    touched = round(args.rows * args.touched) // 10 * 10
    if not 100 <= touched <= args.rows:
        parser.error(
            f"--rows {args.rows} --touched {args.touched:g} has a step touch {touched} rows: "
            f"make it at least 100, of which a tenth fills a bag, and at most {args.rows}"
        )
    report = Report("marker", args)
    report.facts["rows touched"] = touched
    names = {"table": args.rows, "twice the table": 2 * args.rows, "a tenth of the rows": args.rows}
    points = {**names, DURABLE: args.rows} if WITHOUT_FSYNC in args.fsync else {DURABLE: args.rows}
    if WITH_FSYNC not in args.fsync or args.ours:
        points = names
    for point, rows in points.items():
        few = touched // 100 * 10 if point == "a tenth of the rows" else touched
        with scratch("marker") as folder:
            join_group(folder, 0, 1, args.device)
            try:
                only = () if point in ("table", DURABLE) and not args.ours else (OURS, UNPROVED)
                measured, num_bytes = measure(args, rows, few, folder, durable=point == DURABLE, only=only)
                report.add(point, measured, UNPROVED if args.ours else SAVE)
                report.facts[f"bytes, {point}"] = num_bytes
            except UnavailableError as error:
                report.facts[f"{point} is not measured"] = str(error)
            finally:
                dist.destroy_process_group()
    report.add(DIGEST, measure_digest(args.digest_mib << 20, args.rounds), COPY)
    report.facts["MiB of the dense state in the digest"] = args.digest_mib
    report.goals.append(Goal.at_most("digest of the dense state, CPU", 1, report.median(DIGEST, WHOLE), "ms"))
    report.goals.append(Goal.at_most("blocked by a marker, 1% touched", 10, report.median("table", OURS), "ms"))
    one, two = report.median("table", OURS), report.median("twice the table", OURS)
    growth = two / one if one and two else None
    report.goals.append(Goal.at_most("twice the table, the same rows: times as long", 1.25, growth, "x"))
    for point in names:
        proved, unproved = report.median(point, OURS), report.median(point, UNPROVED)
        more = proved - unproved if proved and unproved else None
        report.goals.append(Goal.at_most(f"{point}: what a proof adds", 1.5, more, "ms"))
    report.finish()


if __name__ == "__main__":
    main()
