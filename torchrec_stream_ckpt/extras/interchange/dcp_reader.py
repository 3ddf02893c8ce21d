"""A marker as a checkpoint that ``dcp.load`` reads from its log and store, with no export in between.

Regions of tables are filled with the rows of a marker in the same way as in a restore, but without a model.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError, StreamCkptError
from torchrec_stream_ckpt.extras.interchange.dcp import Keys
from torchrec_stream_ckpt.extras.interchange.dcp_dense import ComparedReader
from torchrec_stream_ckpt.extras.interchange.dcp_entries import MarkerEntries, entries_of, no_exact_state
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Damaged, Job, Region, Route, Tiers, Where, fill, find_marker
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId, TableShard
from torchrec_stream_ckpt.util.units import is_whole


@dataclass(slots=True)
class _Look:
    """One marker, as it was found."""

    route: Route
    entries: MarkerEntries


@dataclass(frozen=True, slots=True)
class _Chosen:
    """(in a plan of DCP) The marker that rank 0 reads; every rank reads the same one."""

    job: bytes
    marker: MarkerId


class StreamReader(StorageReader):
    """Load a marker with ``torch.distributed.checkpoint``, under any plan and on any number of ranks.

    ::

        state = dmp.state_dict()
        dcp.load(state, storage_reader=StreamReader("file:///ckpt/job", "2:7"))
        dmp.load_state_dict(state)

    Keys are those of ``stream-ckpt export --to dcp://``. Every rank reads the data that its own tensors need, from the
    store and from the log, and compares the checksums of all that it reads; it compares no proofs. With ``latest`` all
    ranks read the marker that rank 0 has found. A reader that is used again reads the same marker, until :meth:`reset`.

    Args:
        uri: The job's log; for a job with two tiers both of them, nearest first.
        marker: Its name, in any form that ``restore()`` accepts; ``latest``: the newest one that is complete, judging
            by names and directories.
        store: The job's store; None: the place where the job keeps it. Dense state holds pickles: if only the log names
            the store, name it here, or give the commit key.
        model_key: Key of the model in the state dict that is loaded, such as ``model`` for
            ``{"model": dmp.state_dict()}``; empty if its entries are at the top.
        optimizer_key: Key of the optimizer.
        store_options: Options of the store's client, as in :class:`StreamConfig`.
        kafka_options: Options of Kafka's client, as in :class:`StreamConfig`.
        commit_key_file: The job's commit key, as in :class:`StreamConfig`.

    Raises:
        ConfigError: one of these arguments is not valid.
    """

    def __init__(
        self,
        uri: str | Sequence[str],
        marker: str = "latest",
        *,
        store: str | None = None,
        model_key: str = "",
        optimizer_key: str = "",
        store_options: Options = None,
        kafka_options: Options = None,
        commit_key_file: Path | str | None = None,
    ) -> None:
        super().__init__()
        self._where = Where(uri, store, store_options, kafka_options, commit_key_file)
        self._marker = MarkerId.checked_name(marker)
        self._keys = Keys(model_key, optimizer_key)
        self._look: _Look | None = None
        self._failure: StreamCkptError | None = None
        self._columns: dict[int, set[tuple[int, int]]] = {}
        """Columns of the shards into which weights were loaded last, by table."""
        self._states: set[int] = set()
        """Tables whose row-wise state was loaded."""

    @property
    def marker(self) -> MarkerId | None:
        """The marker that is read; None before the first load, unless it was named as ``GENERATION:MARKER``."""
        if self._look is not None:
            return self._look.route.marker
        return MarkerId.parse(self._marker) if is_whole(self._marker[:1]) else None

    @property
    def step(self) -> int | None:
        """Steps that the job had done at the marker; None before the first load."""
        return self._look.route.commit.step if self._look is not None else None

    # Methods that DCP calls, in this order.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Search again at the next load: for another marker, or for the marker that is then the newest.

        Args:
            checkpoint_id: The other marker, in any form that ``restore()`` accepts; None: as before.

        Raises:
            ConfigError: it is not a marker.
        """
        if checkpoint_id is not None:
            self._marker = MarkerId.checked_name(os.fspath(checkpoint_id))
        self._look, self._failure = None, None
        self._forget_columns()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it may name a marker, judging by its form."""
        with contextlib.suppress(StreamCkptError):
            MarkerId.checked_name(os.fspath(checkpoint_id))
            return True
        return False

    def read_metadata(self) -> Metadata:
        """(all ranks) Find the marker and name its entries. The next call raises the errors of this one, because DCP
        takes an error here, or a ``kwargs`` in this signature, as a sign of a checkpoint of another kind."""
        self._failure = None  # of a load that ended before it was raised
        try:
            return self._looked().entries.metadata
        except StreamCkptError as error:
            self._failure = error
            return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """(all ranks) Raise the error of finding the marker, if there was one.

        Raises:
            MarkerNotFoundError: there is no such marker, or none at all.
            ConfigError: nothing vouches for the place of the dense state, which holds pickles.
            CorruptionError: the marker is damaged.
            UnsupportedError: it has id maps of managed collision.
            LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """(all ranks) Note the marker in the plan."""
        route = self._looked().route
        return replace(plan, storage_data=_Chosen(route.lineage.job, route.marker))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """(rank 0) Make all ranks read the marker of rank 0: a newer one may have been committed while they
        searched."""
        return [replace(plan, storage_data=plans[0].storage_data) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """(all ranks) Read the items of the plan into the tensors of the planner; done on return.

        If data in the store is damaged, its rows are read from other pieces or the log, if these have them.

        Raises:
            CorruptionError: the marker is damaged, or incomplete.
            ColumnResplitError: tensors are cut by columns in another way than the state of column shards.
            SchemaMismatchError: another rank has found another marker, with other entries.
            LogUnavailableError, StoreUnavailableError: the log or the store does not answer.
        """
        look = self._agreed(plan)
        of_tables = [item for item in plan.items if item.storage_index.fqn in look.entries.tables]
        others = [item for item in plan.items if item.storage_index.fqn not in look.entries.tables]
        with self._where.open() as job, torch.no_grad():
            self._read_tables(job, look, of_tables, planner)
            self._read_dense(job, look, others, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # Finding the marker.

    def _looked(self) -> _Look:
        if self._look is None:
            with self._where.open() as job:
                self._look = self._look_at(job, self._marker)
        return self._look

    def _look_at(self, job: Job | Tiers, marker: MarkerId | str) -> _Look:
        route = find_marker(job, marker, Damaged(), check_dense_sizes)
        check_vouched(job, route.commit)
        dense = ComparedReader(route.place.nearest(job), route.commit)
        return _Look(route, entries_of(route.schema, route.own_shards, dense, self._keys))

    def _agreed(self, plan: LoadPlan) -> _Look:
        """Return the marker that rank 0 reads."""
        look, chosen = self._looked(), plan.storage_data
        mine = _Chosen(look.route.lineage.job, look.route.marker)
        if not isinstance(chosen, _Chosen) or chosen == mine:
            return look
        with self._where.open() as job:
            other = self._look_at(job, chosen.marker)
        here, there = look.entries.metadata.state_dict_metadata, other.entries.metadata.state_dict_metadata
        changed = sorted(
            {item.storage_index.fqn for item in plan.items if here.get(fqn_of(item)) != there.get(fqn_of(item))}
        )
        if other.route.lineage.job != chosen.job or changed:
            raise SchemaMismatchError(
                f"rank 0 found marker {chosen.marker}, but this rank found marker {mine.marker}"
                + (f", and their entries differ at {changed[0]}" if changed else " of another job"),
                hint="pass the same URI on all ranks, and name the marker",
            )
        self._look = other
        self._forget_columns()
        return other

    def _forget_columns(self) -> None:
        """Forget the columns: later loads are of another marker."""
        self._columns.clear()
        self._states.clear()

    # Reading.

    def _read_tables(self, job: Job | Tiers, look: _Look, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        self._check_columns(look, items)
        regions: dict[TableShard, Region] = {}
        taken = []
        for item in items:
            _, entry = look.entries.tables[item.storage_index.fqn]
            shard, tensor = region_of(look, item), planner.resolve_tensor(item).detach()
            shape = (shard.rows,) if tensor.dim() == 1 else (shard.rows, shard.cols)
            assert tuple(tensor.shape) == shape, f"{item.storage_index.fqn}: {tuple(tensor.shape)} for {shape}"
            regions.setdefault(shard, Region(shard)).add(entry.state, tensor)
            taken.append((item, tensor))
        damaged = Damaged()
        while True:
            try:
                fill(look.route, job, regions.values())
                break
            except CorruptionError as error:
                damaged.elsewhere(look.route, error)
                look.route = find_marker(job, look.route.marker, damaged, check_dense_sizes)
        for item, tensor in taken:
            planner.commit_tensor(item, tensor)

    def _check_columns(self, look: _Look, items: Iterable[ReadItem]) -> None:
        """Refuse state of column shards if the tensors are visibly cut in another way."""
        pieces: dict[tuple[MetadataIndex, int], list[tuple[int, int]]] = {}
        states: set[int] = set()
        for item in items:
            (table, entry), shard = look.entries.tables[fqn_of(item)], region_of(look, item)
            if entry.state is None:
                begin = shard.col0 - item.dest_offsets[1]
                pieces.setdefault((item.dest_index, table), []).append((begin, shard.col0 + shard.cols))
            elif entry.per_row:
                states.add(table)
        for table in {table for _, table in pieces}:
            self._columns[table] = set()  # perhaps of another model, into which this reader has loaded before
        for (_, table), of_one in pieces.items():
            begin, end = min(first for first, _ in of_one), max(last for _, last in of_one)
            self._columns[table].add((begin, end - begin))
        self._states.update(states)
        for table in states | {table for _, table in pieces}:
            self._check_table(look, table)

    def _check_table(self, look: _Look, table: int) -> None:
        spec, there, here = look.route.schema.tables[table], look.entries.slices[table], self._columns.get(table, set())
        # A tensor of the whole table is a state dict made by hand: its states are those of the marker, end to end.
        cut = {each for each in here if each != (0, spec.dim)}
        wrong = bool(cut - set(there)) and table in self._states
        if spec.optimizer.startswith("emainplace"):  # weights on the left of a shard, their average on its right
            wrong = bool(here - set(there))
        if wrong:
            said = [", ".join(f"[{col0}, {col0 + cols})" for col0, cols in sorted(each)) for each in (here, there)]
            raise no_exact_state(spec.name, f"columns {said[0]}", f"columns {said[1]}")

    def _read_dense(self, job: Job | Tiers, look: _Look, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        in_files = []
        for item in items:
            if (key := fqn_of(item)) in look.entries.values:
                _hand_over(item, look.entries.values[key], planner)
            else:
                index = replace(item.storage_index, fqn=look.entries.dense[key])
                in_files.append(replace(item, storage_index=index))
        if in_files:
            reader = ComparedReader(look.route.place.nearest(job), look.route.commit)
            reader.read_metadata()
            reader.read_data(LoadPlan(in_files), planner)


def fqn_of(item: ReadItem) -> str:
    """Return the key of the entry that an item reads."""
    return str(item.storage_index.fqn)


def region_of(look: _Look, item: ReadItem) -> TableShard:
    """Return the rows and columns of its table that an item reads; for a row-wise state, the columns of its shard."""
    table, _ = look.entries.tables[fqn_of(item)]
    offset = item.storage_index.offset
    assert offset is not None
    if len(offset) == 2:
        row0, col0 = (begin + more for begin, more in zip(offset, item.storage_offsets, strict=True))
        return TableShard(table, row0, item.lengths[0], col0, item.lengths[1])
    rows = max(1, look.route.schema.tables[table].rows)
    col0, cols = look.entries.slices[table][offset[0] // rows]
    return TableShard(table, item.storage_offsets[0], item.lengths[0], col0, cols)


def _hand_over(item: ReadItem, value: Any, planner: LoadPlanner) -> None:
    """Give a value that was read to the planner, as DCP's own reader does."""
    if item.type is LoadItemType.BYTE_IO:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)
        return
    part, target = value, planner.resolve_tensor(item).detach()
    for dim, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dim, begin, length)
    target.copy_(part)
    planner.commit_tensor(item, target)


def check_dense_sizes(job: Job, commit: Commit) -> None:
    """Check that a marker's dense files exist. The requested ones are compared when they are read."""
    ComparedReader(job, commit).compared.check_sizes()


def check_vouched(job: Job | Tiers, commit: Commit) -> None:
    """Check that a setting or a key vouches for the place of the dense state; raises as :meth:`Job.check_vouched`."""
    if isinstance(job, Tiers):
        return  # a tier reads from the store that the caller has named
    for each in (commit, job.lineage.newest):
        if each is not None:
            job.check_vouched(each)
