"""TorchTNT: a callback that restores, marks and closes for a unit. Needs the extra ``tnt``.

::

    unit = Unit(dmp, optimizer)
    state = {"loader": loader, **unit_state(unit, dmp)}
    with StreamCheckpointer(dmp, optimizer, config=config, stateful=state) as ckpt:
        train(unit, loader, max_epochs=3, callbacks=[StreamCheckpointCallback(ckpt)])
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from torch import nn

from torchrec_stream_ckpt.checkpointer import StreamCheckpointer
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.loaders.tracked_loader import TrackedLoader
from torchrec_stream_ckpt.util.types import Committed, Restored

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchtnt 0.2.4 imports pkg_resources, which warns
        from torchtnt.framework.callback import Callback
except ModuleNotFoundError as error:
    raise ImportError(
        f"torchrec_stream_ckpt.tnt needs {error.name}: pip install 'torchrec_stream_ckpt[tnt]'"
    ) from error

Meta = Mapping[str, str | int | float]
"""Type of ``mark(meta=...)``."""

_TRAINED = "train_progress"


def unit_state(unit: Any, model: nn.Module, *, but: Collection[str] = ()) -> dict[str, Any]:
    """Collect the state of a unit other than model and optimizer, for ``StreamCheckpointer(stateful=...)``.

    Args:
        unit: A ``TrainUnit``, ``AutoUnit`` and the like. Its progress and its learning rate schedules are the same on
            all ranks.
        model: The model that is passed to the checkpointer.
        but: Names of attributes that need not be restored, or that you pass yourself: a metric whose state differs by
            rank belongs into ``stateful_per_rank``.

    Raises:
        ConfigError: the unit tracks something else that has state; the error names it.
    """
    state = {**unit.tracked_progress()}
    state |= {f"schedule_{name}": schedule for name, schedule in unit.tracked_lr_schedulers().items()}
    inside = {id(part) for part in model.modules()}
    others = {
        name: module
        for name, module in unit.tracked_modules().items()
        if id(module) not in inside and not _within(module, model) and module.state_dict()
    }
    left = sorted({*others, *unit.tracked_misc_statefuls()} - {*but})
    if left:
        raise ConfigError(
            f"the {type(unit).__name__} tracks {', '.join(left)}, which markers would not save",
            hint=f"name it in unit_state(..., but=[{left[0]!r}]), and pass it in stateful or stateful_per_rank "
            "to restore it",
        )
    return state


def _within(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a module is a wrapper of the model, such as DDP: it holds only the model's own parameters."""
    known = {id(each) for each in _tensors(model)}
    return all(id(each) in known for each in _tensors(module))


def _tensors(module: nn.Module) -> Iterator[Any]:
    yield from module.parameters()
    yield from module.buffers()


class StreamCheckpointCallback(Callback):  # type: ignore[misc]
    """Restores when training starts, steps after each batch, marks at the ends of epochs, and closes.

    Put it first in the list of callbacks: later callbacks then see the restored state. Every rank has one.

    Args:
        checkpointer: The checkpointer of the unit's model, with the result of :func:`unit_state` in its ``stateful``.
        restore: A marker to continue from, by default the newest one; False if you have called ``restore()``,
            ``warm_start()`` or ``standby()`` yourself.
        every_n_epochs: Cut a marker at the end of each n-th epoch, after the unit's own ``on_train_epoch_end``; None:
            only at the intervals of ``StreamConfig``, and at the end.
        meta: (only rank 0's is used) Computes the metadata of the markers of epochs and of the last one, from state and
            unit.
        close: Cut a last marker and close when training ends, and close when it fails. END records ``finished`` or
            ``failed``, and ``preempted`` after SIGTERM (``StreamConfig.on_signal``), which ends training early. False
            if the job continues afterwards: then mark and close yourself.

    Raises:
        ConfigError: ``every_n_epochs`` is less than 1.
    """

    def __init__(
        self,
        checkpointer: StreamCheckpointer,
        *,
        restore: str | bool = True,
        every_n_epochs: int | None = 1,
        meta: Callable[[Any, Any], Meta] | None = None,
        close: bool = True,
    ) -> None:
        if every_n_epochs is not None and every_n_epochs < 1:
            raise ConfigError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        self._checkpointer = checkpointer
        self._restore = restore
        self._every_n_epochs = every_n_epochs
        self._meta = meta
        self._close = close
        self._batches = 0
        """Batches since the last weight update: with gradient accumulation a step has several."""
        self._changed = False
        """True if the state has changed since the last marker of this callback."""
        self._last: Future[Committed] | None = None
        """The last marker of this callback."""
        self.restored: Restored | None = None
        """The state that training has continued from; None if it started from scratch, or ``restore`` is False."""

    def on_train_start(self, state: Any, unit: Any) -> None:
        """Restore, before the first batch is fetched.

        Raises:
            ConfigError: the checkpointer does not hold the unit's progress, so a restored job would start its epochs
                again.
            StreamCkptError: as ``StreamCheckpointer.restore()``.
        """
        if _TRAINED not in self._checkpointer.schema().stateful:
            raise ConfigError(
                "the checkpointer does not save the progress of the unit",
                hint="pass StreamCheckpointer(..., stateful={**unit_state(unit, model), ...})",
            )
        if self._restore is not False:
            self.restored = self._checkpointer.restore(None if self._restore is True else self._restore)

    def on_train_step_end(self, state: Any, unit: Any) -> None:
        """Count a trained batch, and step unless gradients are still accumulating."""
        self._changed = True
        self._batches += 1
        accumulated = getattr(unit, "gradient_accumulation_steps", 1)
        if unit.train_progress.num_steps_completed_in_epoch % accumulated == 0:
            self._step()
            if self._checkpointer.should_stop:  # after SIGTERM and its marker, on all ranks
                state.stop()

    def on_train_epoch_end(self, state: Any, unit: Any) -> None:
        """Mark, if it is time: the unit's progress already counts the epoch."""
        if self._checkpointer.should_stop:
            return
        self._step()
        loader = state.train_state.dataloader
        if isinstance(loader, TrackedLoader) and not loader.in_flight:
            loader.end_epoch()  # it cannot know that if the unit fetches through a pipeline
        if self._every_n_epochs is not None and unit.train_progress.num_epochs_completed % self._every_n_epochs == 0:
            self._mark(state, unit)

    def on_eval_end(self, state: Any, unit: Any) -> None:
        """Note a change: evaluation advances the unit's progress, too."""
        self._changed = True

    def on_train_end(self, state: Any, unit: Any) -> None:
        """Mark state that no marker has yet, wait for the marker, and close."""
        if not self._close:
            return
        if self._checkpointer.should_stop:  # a grace period has no time for a second marker
            self._checkpointer.close()
            return
        if self._changed:
            self._mark(state, unit)
        if self._last is not None:
            self._last.result()
        self._checkpointer.close(outcome="finished")

    def on_exception(self, state: Any, unit: Any, exc: BaseException) -> None:
        """Close: END records ``failed``, with the class of the exception. TorchTNT raises it again."""
        if self._close:
            self._checkpointer.close()

    def _step(self) -> None:
        if self._batches:
            batches, self._batches = self._batches, 0
            self._checkpointer.step(batches)

    def _mark(self, state: Any, unit: Any) -> None:
        """Start a marker, even if one was just cut at its interval: the unit's progress has changed since."""
        self._last = self._checkpointer.mark()
        self._changed = False
        if self._meta is not None:
            self._last = self._checkpointer.mark(self._meta(state, unit))
