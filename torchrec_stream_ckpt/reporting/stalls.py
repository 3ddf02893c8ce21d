"""How long steps were held up: from the scalars that the trainer wrote for TensorBoard. The log does not hold it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError

MEAN, LONGEST = "stream_ckpt/blocked_ms_mean", "stream_ckpt/blocked_ms_max"


@dataclass(frozen=True, slots=True)
class Stalls:
    """(step, milliseconds) of the training thread in ``step()``, of rank 0, about a point a second."""

    mean: tuple[tuple[float, float], ...]
    longest: tuple[tuple[float, float], ...]


def read_stalls(folder: Path) -> Stalls:
    """The scalars in ``folder`` and the folders below it.

    Raises:
        ConfigError: TensorBoard is not installed, or there are no such scalars.
    """
    try:
        from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    except ImportError:
        raise ConfigError(
            "reading scalars needs TensorBoard, which is not installed",
            hint="pip install 'torchrec_stream_ckpt[tensorboard]', or leave out --tensorboard",
        ) from None
    runs = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder))
    runs.Reload()
    found: dict[str, dict[float, float]] = {MEAN: {}, LONGEST: {}}
    for run, tags in runs.Runs().items():
        for tag in found.keys() & set(tags["scalars"]):
            found[tag] |= {float(event.step): float(event.value) for event in runs.Scalars(run, tag)}
    if not found[LONGEST]:
        raise ConfigError(
            f"no scalars {LONGEST} are there",
            hint="name the folder that the job was given as --tensorboard",
            path=folder,
        )
    mean, longest = (tuple(sorted(found[tag].items())) for tag in (MEAN, LONGEST))
    return Stalls(mean, longest)
