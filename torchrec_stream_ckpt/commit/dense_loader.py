"""Brings the dense state of a marker back into the live objects: compares it first, then loads it in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from torchrec_stream_ckpt.adapter import CollisionMap, check_wrappers, load_wrapper_states
from torchrec_stream_ckpt.commit import optimizer_state
from torchrec_stream_ckpt.commit.dcp import flat, load_here
from torchrec_stream_ckpt.commit.gradient_loader import load_gradients
from torchrec_stream_ckpt.commit.hyperparameters import given, set_fused_values, told
from torchrec_stream_ckpt.commit.id_maps import PREFIX, State, empty_pieces, merge_pieces
from torchrec_stream_ckpt.commit.live_dense import LiveDense, names_of
from torchrec_stream_ckpt.commit.match import Match, check_entries, check_names, check_stateful
from torchrec_stream_ckpt.commit.optimizer_state import OptimizerState
from torchrec_stream_ckpt.commit.random_state import seed_new_rank, set_random_state
from torchrec_stream_ckpt.commit.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import ConfigError

log = logging.getLogger(__name__)


class DenseLoader:
    """Compares and loads the dense state of markers.

    Args:
        live: The objects of this rank.
    """

    def __init__(self, live: LiveDense) -> None:
        self._live = live
        self._given = given(live.kernels, live.optimizers)
        """Hyperparameters as the code has given them."""

    def check(self, saved: SavedDense, match: Match | None = None) -> None:
        """Refuse a marker that does not fit this job, before anything is written. Local.

        Compared are id maps, the parameters of the model by name, shape and dtype, and the names of the user's
        objects. What optimizers keep is compared when it is read, by :meth:`load`.

        Args:
            saved: What it holds, for this rank.
            match: What of it a changed model takes; None: all, by the same names.

        Raises:
            SchemaMismatchError: names the entry, or the table and the rows there and here.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        self._read_id_maps(saved, match)
        self._check_world(saved, match)
        if match is None:
            self._check_whole(saved)

    def _check_whole(self, saved: SavedDense) -> None:
        if saved.imported:
            check_entries(self._imported(), saved.entries)
            return
        check_stateful(saved.stateful("shared"), self._live.handed)
        check_stateful(saved.stateful("per_rank"), self._live.per_rank)
        check_entries(_model(self._live.view()), saved.entries)

    def _check_world(self, saved: SavedDense, match: Match | None) -> None:
        per_rank = self._live.per_rank if match is None else match.per_rank
        if per_rank and not saved.imported and saved.world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(per_rank)}: saved for each of {saved.world} ranks, this job has {dist.get_world_size()}",
                hint="hand it over in stateful if ranks have the same state, in stateful_rank0 if rank 0's serves all",
            )

    def _imported(self) -> dict[str, Any]:
        """Return what an imported marker has of the model."""
        return {f"model.{name}": value for name, value in self._live.view().state_dict().items()}

    def load(self, saved: SavedDense, match: Match | None = None) -> Callable[[], None]:
        """Load model and optimizers of a marker. Local.

        Random state and buffers come back on ranks that existed then; a new rank takes the buffers of rank 0
        and random state derived from the job's seed and its rank. With ``match``, what it does not name stays as it is.

        Returns:
            Loads the rest, to be called once: the user's objects, whose code may change anything, then random state.

        Raises:
            SchemaMismatchError: the dense model or an optimizer differs; names the entry and both values.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        if match is None:
            self._check_whole(saved)
        if saved.imported:
            self._load_imported(saved, match)
            return lambda: None
        self._check_world(saved, match)
        whole, match = match is None, match or self._all()
        blobs = saved.blobs(match.shared, match.per_rank)
        view = self._live.view()
        names, parameters = names_of(view), dict(view.named_parameters())
        check_wrappers(self._live.optimizer, blobs["wrappers"])
        schedules = self._merged_schedules(saved, blobs, whole=whole)
        states, fused = saved.optimizers(match.there(parameters), whole=whole)
        if whole:
            check_names(view.state_dict().keys() - parameters.keys(), saved.buffers.keys())
            optimizer_state.check(self._live.optimizers, states, names)
        else:
            states = optimizer_state.matched(self._live.optimizers, states, match.states, match.groups, names)
        self._load_model(saved, view, match, buffers=saved.buffers)
        for key, optimizer in self._live.optimizers.items():
            fresh = parameters.keys() - match.states[key].keys()
            optimizer_state.put_back(optimizer, parameters, states[key], fresh)
        load_gradients(self._live.gradients, saved, parameters, match.entries)
        load_wrapper_states(self._live.optimizer, blobs["wrappers"])
        set_fused_values(self._live.kernels, [match.by_table(values) for values in fused])
        if different := told(self._given, given(self._live.kernels, self._live.optimizers)):
            log.warning("hyperparameters are those of the marker, not those that the code gives: %s", different)
        return lambda: self._load_rest(blobs, schedules, known=dist.get_rank() < saved.world)

    def _merged_schedules(self, saved: SavedDense, blobs: dict[str, Any], *, whole: bool) -> dict[str, Any]:
        """What each live schedule takes of the marker; nothing is changed."""
        found = {}
        for name, schedule in self._live.schedules.items():
            if name in blobs["schedules"]:
                found[name] = schedule.merged(blobs["schedules"][name], saved.source, whole=whole)
            elif name in blobs["shared"]:
                found[name] = schedule.older(blobs["shared"].pop(name))
        return found

    def _all(self) -> Match:
        """All of a marker, by the same names."""
        names = {name: name for name in self._live.view().state_dict()}
        states = {key: {name: (key, name) for name in names} for key in self._live.optimizers}
        return Match(names, states, self._live.handed, self._live.per_rank)

    def _load_model(self, saved: SavedDense, view: nn.Module, match: Match, buffers: Mapping[str, Any]) -> None:
        """Parameters, id maps and buffers; what is not matched is copied onto itself."""
        live = view.state_dict()
        of_files = {name for name in match.entries if match.entries[name] not in buffers}
        room = {f"model.{match.entries[name]}": live[name] for name in of_files}
        load_here(room, saved.reader)
        maps, states = self._read_id_maps(saved, match)
        for id_map, state in zip(maps, states, strict=True):
            id_map.write(state)
        found = {name: room[f"model.{match.entries[name]}"] for name in of_files}
        view.load_state_dict({**live, **found, **match.here(buffers)})

    def _load_rest(self, blobs: dict[str, Any], schedules: dict[str, Any], *, known: bool) -> None:
        """The user's objects, then random state, of which their code may have drawn."""
        for name, state in schedules.items():
            self._live.schedules[name].load(state)
        for name, state in blobs["shared"].items():
            self._live.shared[name].load_state_dict(state)
        for name, state in blobs["per_rank"].items():
            self._live.per_rank[name].load_state_dict(state)
        if known:
            set_random_state(blobs["random"], blobs["seed"], dist.get_rank())
        else:
            seed_new_rank(blobs["seed"], dist.get_rank())

    def _load_imported(self, saved: SavedDense, match: Match | None) -> None:
        """A marker that ``stream-ckpt import`` has made: what it does not hold stays as the job has made it."""
        whole, match = match is None, match or self._all()
        view = self._live.view()
        parameters, names = dict(view.named_parameters()), names_of(view)
        imported = saved.older_states(match.there(parameters), whole=whole).get("imported", {})
        self._load_model(saved, view, match, buffers={})
        for key, optimizer in self._live.optimizers.items():
            groups = optimizer_state.named_groups(optimizer, names)
            kept = match.states.get(key, {})
            mine = {name for group in groups for name in group["params"]}
            state = {name: imported[there] for name, (_, there) in kept.items() if name in mine and there in imported}
            there = OptimizerState(type(optimizer).__name__, groups, state)
            optimizer_state.put_back(optimizer, parameters, there, parameters.keys() - state.keys())
        log.warning(
            "the marker was imported: random state, stateful objects, param groups, learning rates and the kernels' "
            "iterations stay as this job has made them"
        )

    def _read_id_maps(self, saved: SavedDense, match: Match | None) -> tuple[list[CollisionMap], list[State]]:
        """The live maps that come from a marker, and their state there."""
        come = {each.table: each.table for each in self._live.id_maps}
        if match is not None and match.id_maps is not None:
            come = {table: match.id_maps[table] for table in come if table in match.id_maps}
        maps = [each for each in self._live.id_maps if each.table in come]
        if not maps:
            return [], []
        pieces = empty_pieces(saved.entries, maps, come)
        saved.read(flat(PREFIX, pieces))
        return maps, merge_pieces(maps, pieces, come)


def _model(view: nn.Module) -> dict[str, Any]:
    """The parameters, by their entries."""
    parameters = dict(view.named_parameters())
    return {f"model.{name}": value for name, value in view.state_dict().items() if name in parameters}
