"""Delete what gc has decided on, by tasks of an engine: each deletes a batch of names.

A batch may be deleted twice, and by a worker that is late: when its run has ended, nothing of it goes any more. The run
takes the list of garbage that names the batch away at its end, and a worker looks for that list again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torchrec_stream_ckpt.engine.api import Engine, Site
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.manifest import Garbage
from torchrec_stream_ckpt.store.api import Objects

BATCH_NAMES = 1024
"""Names that one task deletes."""
_NAME_BYTES = 64 * 2**10
"""Deleting an object takes about as long as reading so much."""
LOOK_EVERY = 64
"""Names after which a task looks whether its list is still there."""
_PATIENCE_S = 0.2


@dataclass(frozen=True, slots=True)
class DeleteTask:
    """Objects that nobody needs."""

    names: tuple[str, ...]
    listed: str | None
    """The list of garbage that names them; None: they went without a grace period, and stand on none."""

    @property
    def num_bytes(self) -> int:
        """What could be read in the time that it takes."""
        return len(self.names) * _NAME_BYTES

    def __str__(self) -> str:
        return f"delete {len(self.names)} objects from {self.names[0]} on"

    def run(self, site: Site) -> None:
        """As of ``Task``. An object that is gone is no error."""
        for names in _cut(self.names, LOOK_EVERY):
            if self.listed is not None and site.objects.size(self.listed) is None:
                return  # the run that asked for this is over: what has such a name now is needed
            for _ in site.pool.map(partial(_delete, site.objects), names):
                site.tell(0)


def delete_all(engine: Engine, names: Sequence[str], lists: Iterable[tuple[str, Garbage]]) -> None:
    """Delete objects, and wait until they are gone.

    Args:
        engine: Runs the tasks.
        names: Of the objects: none of them names another one.
        lists: The lists of garbage, with their names.

    Raises:
        StoreUnavailableError: the store does not answer, or there is no right to delete. Some may be gone.
        EngineUnavailableError: what runs tasks is away; likewise.
    """
    on_list = {name: listed for listed, garbage in lists for name in garbage.names}
    futures = []
    try:
        for task in _tasks(names, on_list.get):
            futures.append(engine.submit(task))
        while left := [future for future in futures if not future.done()]:
            engine.wait(left, _PATIENCE_S)
        for future in futures:
            future.result()
    finally:
        for future in futures:
            future.cancel()


def _tasks(names: Sequence[str], list_of: Callable[[str], str | None]) -> Iterator[DeleteTask]:
    """By the lists that name them, each in the order that was given."""
    by_list: dict[str | None, list[str]] = {}
    for name in names:
        by_list.setdefault(list_of(name), []).append(name)
    for listed, each in by_list.items():
        for batch in _cut(each, BATCH_NAMES):
            yield DeleteTask(tuple(batch), listed)


def _cut(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    return (names[begin : begin + most] for begin in range(0, len(names), most))


def _delete(objects: Objects, name: str) -> None:
    objects.delete(name)
    failpoint("gc.deleted")
