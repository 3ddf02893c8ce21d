"""Load the dense state of a marker into the live objects: compare all of it first, then load it in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from torchrec_stream_ckpt.dense import optimizer_state
from torchrec_stream_ckpt.dense.buffer_memory import overlaps
from torchrec_stream_ckpt.dense.dcp import flat, load_here
from torchrec_stream_ckpt.dense.entry_matching import Match, dense_entry
from torchrec_stream_ckpt.dense.gradient_loader import load_gradients
from torchrec_stream_ckpt.dense.hyperparameters import check_fused_values, given, set_fused_values, told
from torchrec_stream_ckpt.dense.id_maps import PREFIX, State, all_pieces, empty_pieces, merge_pieces
from torchrec_stream_ckpt.dense.live_dense import LiveDense, names_of
from torchrec_stream_ckpt.dense.optimizer_state import OptimizerState
from torchrec_stream_ckpt.dense.random_state import seed_new_rank, set_random_state
from torchrec_stream_ckpt.dense.reassignment import new_rows, state_at
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import ChangesError, ConfigError, SchemaMismatchError, StreamCkptError
from torchrec_stream_ckpt.evolve.findings import Misfit
from torchrec_stream_ckpt.evolve.model_schema import DenseEntry
from torchrec_stream_ckpt.evolve.row_maps import NewRows
from torchrec_stream_ckpt.model import IdMap, MapShard, check_wrappers, load_wrapper_states

log = logging.getLogger(__name__)


class DenseLoader:
    """Compares and loads the dense state of markers.

    Args:
        live: The objects of this rank.
    """

    def __init__(self, live: LiveDense) -> None:
        self._live = live
        self._given = given(live.kernels, live.optimizers)
        """Hyperparameters as the code has set them."""

    # Before anything is written.

    def entries(self, saved: SavedDense) -> tuple[tuple[DenseEntry, ...], tuple[DenseEntry, ...]]:
        """Pair parameters and buffers of a marker with those of this model. A restored entry is the same in both.

        Returns:
            Entries of the marker, and entries of this model.
        """
        parameters, rest = self._live.entries()
        apart = {entry.name for entry in rest}
        if saved.imported:
            names = {entry.name for entry in parameters} | apart
            held = {entry.name: entry for entry in saved.parameters if entry.name not in names}
            there, here = self._live.buffers.compare(held, None)
            return (*(each for each in saved.parameters if each.name in names), *there), (*parameters, *here, *rest)
        record = saved.buffer_record
        slots = {name for name in saved.buffers if name not in apart} if record is None else record.now.keys()
        held = {name: dense_entry(name, value) for name, value in saved.buffers.items()}
        there, here = self._live.buffers.compare({name: held[name] for name in held if name in slots}, record)
        objects = (entry for name, entry in held.items() if name not in slots)
        return (*saved.parameters, *there, *objects), (*parameters, *here, *rest)

    def misfits(self, saved: SavedDense, match: Match | None, *, whole: bool) -> list[Misfit]:
        """Compare all dense state that no ``Changes`` can declare. Local; nothing is written.

        Args:
            saved: Dense state of the marker.
            match: Parts of it that a changed model takes. If None, all parts with the same names.
            whole: True to compare optimizers and id maps, too. The match must be known for that.

        Returns:
            All differences.
        """
        found = [Misfit(f"'{name}' is missing from the marker", "restore another marker") for name in saved.missing()]
        if not found and not saved.imported:
            found += self._caught(lambda: check_wrappers(self._live.optimizer, saved.wrappers))
        found += self._caught(lambda: self._check_world(saved, match))
        found += self._unreadable(saved, match)
        if whole:
            found += self._id_maps_differ(saved, match)
            if not saved.imported:
                found += self._caught(lambda: self._merged_schedules(saved, match))
            found += self._optimizers_differ(saved, match)
            found += map(Misfit.of, check_fused_values(self._live.kernels, self._fused(saved, match)))
        return found

    def new_rows(
        self, saved: SavedDense, shards: Sequence[Mapping[str, MapShard]], table: str, there: str
    ) -> NewRows | None:
        """Give the raw ids of one table rows of this job. Local, and the same on all ranks; nothing is written.

        Args:
            saved: Dense state of the marker.
            shards: The id maps of each rank.
            table: Name of the table in this model.
            there: Its name in the marker.

        Returns:
            The new rows. None if each shard is a union of the marker's, so that its state can be kept as it is.

        Raises:
            ChangesError: One side has no id map for the table.
            SchemaMismatchError: The maps of the marker cannot be divided, or are of another kind.
        """
        here = next((each for each in self._live.id_maps if each.table == table), None)
        if there not in saved.collisions or not any(table in each for each in shards):
            where = "the marker" if there not in saved.collisions else "this model"
            raise ChangesError(f"{where} has no id map (managed collision) for this table")
        if here is None or not all(table in each for each in shards):
            raise SchemaMismatchError("not every rank has a part of the id map", table=table)
        return new_rows(here, [each[table] for each in shards], self._all_pieces(saved, here, there))

    @staticmethod
    def _all_pieces(saved: SavedDense, here: IdMap, there: str) -> dict[str, State]:
        """Read the whole id map of a table."""
        pieces = all_pieces(saved.entries, here, there)
        saved.read(flat(PREFIX, {there: pieces}))
        return pieces

    @staticmethod
    def _caught(compare: Callable[[], object]) -> list[Misfit]:
        try:
            compare()
        except (SchemaMismatchError, ConfigError) as error:
            return [Misfit.of(error)]
        return []

    def _check_world(self, saved: SavedDense, match: Match | None) -> None:
        here = self._live.per_rank if match is None else match.per_rank
        per_rank = [name for name in here if name in saved.stateful("per_rank")]
        if per_rank and not saved.imported and saved.world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(per_rank)}: the marker has the state of {saved.world} ranks, but this job has "
                f"{dist.get_world_size()}",
                hint="pass it in stateful if all ranks have the same state, or in stateful_rank0 to use rank 0's",
            )

    def _objects(self, saved: SavedDense, match: Match | None) -> Iterator[tuple[str, str]]:
        """Yield owner and name of each of the user's objects whose state is restored."""
        if saved.imported:
            return
        live = {"shared": self._live.shared, "per_rank": self._live.per_rank}
        come = live if match is None else {"shared": match.shared, "per_rank": match.per_rank}
        for owner, objects in live.items():
            there = saved.stateful(owner)
            yield from ((owner, name) for name in objects if name in come[owner] and name in there)

    def _unreadable(self, saved: SavedDense, match: Match | None) -> list[Misfit]:
        """Return a misfit for each object whose state cannot be read, or that rejects it.

        States read are kept for the load.
        """
        objects = list(self._objects(saved, match))
        saved.read_objects(objects)
        return [misfit for owner, name in objects for misfit in self._caught(partial(self._ask, saved, owner, name))]

    def _ask(self, saved: SavedDense, owner: str, name: str) -> None:
        """Read the state of an object, and let the object check it, if it can do so without changing itself."""
        state = saved.object_of(owner, name)
        item = (self._live.shared if owner == "shared" else self._live.per_rank)[name]
        check = getattr(item, "check_state_dict", None)
        if callable(check):
            check(state)

    def _fused(self, saved: SavedDense, match: Match | None) -> list[Any]:
        found = saved.fused
        return found if match is None else [match.by_table(values) for values in found]

    def _optimizers_differ(self, saved: SavedDense, match: Match | None) -> list[Misfit]:
        """Return misfits of the optimizers, other than of classes and groups, which are compared by name."""
        view = self._live.view()
        names, there = names_of(view), saved.outline()
        lacking = [] if saved.tree is None else optimizer_state.missing_tensors(saved.tree, saved.entries)
        found = [Misfit(f"'{entry}' is missing from the marker", "restore another marker") for entry in lacking]
        if saved.imported:
            return found
        if match is not None:
            live = self._live.optimizers
            return found + self._caught(lambda: optimizer_state.matched(live, there, match.states, match.groups, names))
        for key, optimizer in self._live.optimizers.items():
            if key in there and _same_groups(optimizer, there[key], names):
                one = {key: optimizer}, {key: there[key]}
                found += self._caught(partial(optimizer_state.check, *one, names))
        return found

    # All has been compared.

    def load(self, saved: SavedDense, match: Match | None = None) -> Callable[[], None]:
        """Load model and optimizers of a marker that was compared. Local.

        Random state and buffers are restored on ranks that existed then. A new rank takes the buffers of rank 0 and
        random state derived from the job's seed and its rank. With ``match``, entries that it does not name stay
        unchanged.

        Returns:
            A function that loads the rest: the user's objects, whose code may change anything, then random state. Call
                it once.
        """
        if saved.imported:
            self._load_imported(saved, match)
            return lambda: None
        whole, taken = match is None, match or self._all()
        view = self._live.view()
        names, parameters = names_of(view), dict(view.named_parameters())
        schedules = self._merged_schedules(saved, match)
        states = saved.optimizers(taken.there(parameters), whole=whole)
        if not whole:
            states = optimizer_state.matched(self._live.optimizers, states, taken.states, taken.groups, names)
        fused = self._fused(saved, match)
        self._load_model(saved, taken)
        for key, optimizer in self._live.optimizers.items():
            fresh = parameters.keys() - taken.states[key].keys()
            optimizer_state.put_back(optimizer, parameters, states[key], fresh)
        load_gradients(self._live.gradients, saved, parameters, taken.entries)
        load_wrapper_states(self._live.optimizer, saved.wrappers)
        set_fused_values(self._live.kernels, fused)
        if different := told(self._given, given(self._live.kernels, self._live.optimizers)):
            log.warning("the marker's hyperparameters replace those set in the code: %s", different)
        return lambda: self._load_rest(saved, match, schedules)

    def _merged_schedules(self, saved: SavedDense, match: Match | None) -> dict[str, Any]:
        """Return the state that each live schedule takes from the marker. Nothing is changed."""
        found = {}
        there = saved.stateful("shared")
        for name, schedule in self._live.schedules.items():
            if name in there and (match is None or name in match.shared):
                states = saved.schedule(name)
                if states is None:
                    found[name] = schedule.older(saved.object_of("shared", name))
                else:
                    found[name] = schedule.merged(states, saved.source, whole=match is None)
        return found

    def _all(self) -> Match:
        """Match all of a marker by the same names."""
        names = {name: name for name in (*self._live.view().state_dict(), *self._live.buffers.attached)}
        states = {key: {name: (key, name) for name in names} for key in self._live.optimizers}
        return Match(names, states, self._live.handed, self._live.per_rank)

    def _load_model(self, saved: SavedDense, match: Match) -> None:
        """Load buffers, parameters and id maps. Values that are not matched are copied onto themselves."""
        held = self._put_buffers(saved, match)
        view = self._live.view()  # takes over buffers of modules that hold sharded ones in their current state
        live = view.state_dict()
        of_files = {
            name: f"model.{there}"
            for name, there in match.entries.items()
            if name not in held and f"model.{there}" in saved.entries
        }
        room = load_here({entry: live[name] for name, entry in of_files.items()}, saved.reader)
        maps, states = self._read_id_maps(saved, match)
        for id_map, state in zip(maps, states, strict=True):
            id_map.write(state)
        for each in self._live.id_maps:
            if each.table in match.reassigned:
                there, rows = match.reassigned[each.table]
                each.write(state_at(each, rows, self._all_pieces(saved, each, there)))
        found = {name: room[entry] for name, entry in of_files.items()}
        values = {} if saved.imported else match.here(saved.buffers)
        rest = {name: value for name, value in values.items() if name not in held}
        fixed = {name for name, value in live.items() if isinstance(value, torch.Tensor) and _takes_no_copy(value)}
        loaded = {name: value for name, value in {**live, **found, **rest}.items() if name not in fixed}
        view.load_state_dict(loaded, strict=not fixed)

    def _put_buffers(self, saved: SavedDense, match: Match) -> set[str]:
        """Put the marker's buffers into the live modules. Returns their names in this model."""
        attached, record = self._live.buffers.attached, saved.buffer_record
        if saved.imported:
            come = {name: there for name, there in match.entries.items() if name in attached and there in saved.model}
            empty = {
                f"model.{there}": torch.empty(*saved.model[there][:1], dtype=saved.model[there][1], device="cpu")
                for there in come.values()
            }
            loaded = load_here(empty, saved.reader)
            self._live.buffers.put({name: loaded[f"model.{there}"] for name, there in come.items()}, None)
            return set(come)
        if record is None:
            values = {name: value for name, value in match.here(saved.buffers).items() if name in attached}
            self._live.buffers.put(values, None)
            return set(values)
        come = {name: there for name, there in match.entries.items() if there in record.attached or there in record.now}
        registered = record.now.keys() - record.attached.keys()
        come |= {name: name for name in registered if name not in come and name not in attached}
        removed = [name for name, there in come.items() if there not in record.now]
        removed += self._live.buffers.tensors().keys() - attached.keys() - come.keys()  # registered since the attach
        values = {name: saved.buffers.get(there) for name, there in come.items() if there in record.now}
        self._live.buffers.put(values, record.renamed({there: name for name, there in come.items()}), removed)
        return set(come)

    def _load_rest(self, saved: SavedDense, match: Match | None, schedules: dict[str, Any]) -> None:
        """Load the user's objects, then random state, because their code may have drawn random numbers."""
        for name, state in schedules.items():
            self._live.schedules[name].load(state)
        live = {"shared": self._live.shared, "per_rank": self._live.per_rank}
        for owner, name in self._objects(saved, match):
            item, state = live[owner][name], saved.object_of(owner, name)
            try:
                item.load_state_dict(state)
            except Exception as error:  # raised by the user's code
                raise StreamCkptError(
                    f"load_state_dict() of the Stateful '{name}' ({type(item).__name__}) failed: "
                    f"{type(error).__name__}: {error}",
                    hint="make it accept the state saved in the marker, then call restore() again",
                    rank=dist.get_rank(),
                ) from error
        self._live.schedule_watch.begin()
        seed, random = saved.random()
        if dist.get_rank() < saved.world:
            set_random_state(random, seed, dist.get_rank())
        else:
            seed_new_rank(seed, dist.get_rank())

    def _load_imported(self, saved: SavedDense, match: Match | None) -> None:
        """Load a marker that ``stream-ckpt import`` created.

        State that it does not hold stays as the job created it.
        """
        whole, match = match is None, match or self._all()
        view = self._live.view()
        parameters, names = dict(view.named_parameters()), names_of(view)
        imported = saved.older_states(match.there(parameters), whole=whole).get("imported", {})
        self._load_model(saved, match)
        for key, optimizer in self._live.optimizers.items():
            groups = optimizer_state.named_groups(optimizer, names)
            kept = match.states.get(key, {})
            mine = {name for group in groups for name in group["params"]}
            state = {name: imported[there] for name, (_, there) in kept.items() if name in mine and there in imported}
            there = OptimizerState(type(optimizer).__name__, groups, state)
            optimizer_state.put_back(optimizer, parameters, there, parameters.keys() - state.keys())
        log.warning(
            "the marker was imported: this job keeps its own random state, stateful objects, param groups, learning "
            "rates and kernel iteration counts"
        )

    def _id_maps_differ(self, saved: SavedDense, match: Match | None) -> list[Misfit]:
        """Compare all id maps in one read. Only if some do not fit, read them table by table, to name each of these."""
        if not self._caught(partial(self._read_id_maps, saved, match)):
            return []
        tables = dict.fromkeys(each.table for each in self._live.id_maps)
        found = [self._caught(partial(self._read_id_maps, saved, match, table)) for table in tables]
        return [misfit for each in found for misfit in each]

    def _read_id_maps(
        self, saved: SavedDense, match: Match | None, only: str | None = None
    ) -> tuple[list[IdMap], list[State]]:
        """Return the live maps that are restored from a marker, or those of one table only, and their state there."""
        come = {each.table: each.table for each in self._live.id_maps if only in (None, each.table)}
        if match is not None and match.id_maps is not None:
            come = {table: match.id_maps[table] for table in come if table in match.id_maps}
        maps = [each for each in self._live.id_maps if each.table in come]
        if not maps:
            return [], []
        pieces = empty_pieces(saved.entries, maps, come)
        saved.read(flat(PREFIX, pieces))
        return maps, merge_pieces(maps, pieces, come)


def _same_groups(optimizer: torch.optim.Optimizer, saved: OptimizerState, names: Mapping[int, str]) -> bool:
    """Return whether classes and groups are equal, in any order of parameters."""
    here = [frozenset(group["params"]) for group in optimizer_state.named_groups(optimizer, names) if group["params"]]
    there = [frozenset(group["params"]) for group in saved.groups if group["params"]]
    return saved.kind == type(optimizer).__name__ and here == there


def _takes_no_copy(value: torch.Tensor) -> bool:
    return is_lazy(value) or overlaps(value)
