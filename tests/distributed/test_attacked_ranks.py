"""Rows that are taken away, or changed, for a marker of four ranks: a job under another plan finds them within a round.

At the mask, in the frame, in the log and where a restore places them; one at a time. One subject is a model of sharded
and replicated tables that comes back on four ranks under another plan, the other one is managed collision on two.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import collided as collision
from tests import ranks, zoo
from tests.forged import Frames, forge, on_rank_0
from tests.laps import config
from tests.parts import FrameBuffer, RowStager, Target
from tests.sampled import marks_of
from tests.zoo_models import Job, Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.capture.touched import TouchedRows
from torchrec_stream_ckpt.errors import ProofMismatchError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.rows import RowsView

pytestmark = pytest.mark.distributed

MODEL = Model(
    (
        Part(
            "ebc",
            (
                Table("t_tw", 150, 8, ("a",), dtype="fp16"),
                Table("t_rw", 260, 8, ("b",)),
                Table("t_cw", 130, 32, ("c",)),
                Table("t_dp", 70, 4, ("d",)),
            ),
        ),
    ),
    "rowwise_adagrad",
)
WRITER = Plan(4, 4, (Place("tw", (0,)), Place("rw"), Place("cw", (0, 3)), Place("dp")))
READER = Plan(4, 4, (Place("rw"), Place("tw", (2,)), Place("cw", (2, 1)), Place("dp")))
ROUND = 6
"""Markers in which every block is proved once, with some to spare."""
MARKERS = [f"1:{number}" for number in range(1, ROUND + 2)]
WORLDS = {"plan": (4, 4), "collision": (4, 2)}
"""Subject -> ranks that write and ranks that read."""
WINDOWS = {"plan": 7_000, "collision": 200}


Making = Callable[[StreamConfig], StreamCheckpointer]


def _job(subject: str, *, reads: bool) -> tuple[Making, Callable[[], None]]:
    """What makes its checkpointer, and one step of it."""
    if subject == "collision":
        each = collision.job()
        each.step_number = 500 * reads
        parts = each.dmp, each.optimizer
        return lambda where: StreamCheckpointer(*parts, config=where, stateful={"loader": each}), each.step
    job = zoo.build(MODEL, READER if reads else WRITER)
    return lambda where: zoo.attach(job, where, paranoid=False), lambda: _step(job)


def _step(job: Job) -> None:
    job.step += 1
    zoo.train(job)


def _train(subject: str, where: StreamConfig, attack: str) -> None:
    """Marker 1:1 after four steps, 1:2 after one that is attacked on rank 0, then those of a round.

    No table evicts at the fifth step: TorchRec resets its rows in place, and then all of them are sent.
    """
    make, step = _job(subject, reads=False)
    with make(where) as checkpointer:
        checkpointer.restore()
        for number in range(5):
            if number == 4 and attack and dist.get_rank() == 0:
                TRAINED[attack]()
            step()
            checkpointer.step()
            if number >= 3:
                checkpointer.mark().result(60)
        for _ in range(ROUND - 1):
            checkpointer.step()  # a boundary of its own: at this one, all is in a marker already
            checkpointer.mark().result(60)


def _restore(subject: str, where: StreamConfig, attack: str) -> list[str]:
    """What the restore of each marker says, up to the first one that is refused."""
    if attack:
        PLACED[attack]()
    said = []
    for marker in MARKERS:
        make, step = _job(subject, reads=True)
        step()
        with make(where) as checkpointer:
            try:
                restored = checkpointer.restore(marker)
            except ProofMismatchError as error:
                return [*said, str(error)]
        assert restored is not None
        said.append(f"proved {restored.proved:.2f}")
    return said


# At the mask, and in the frame; from the step on in which they are called.


def mask_taken() -> None:
    """The step leaves no mark; nothing is trained after it."""
    TouchedRows.mark = lambda *_: None  # type: ignore[assignment, method-assign]


Fill = Callable[[torch.Tensor], None]


def _first_frame(change: Callable[[Fill, torch.Tensor, FrameBuffer], None]) -> None:
    fill, done = RowStager.fill, list[bool]()

    def filling(stager: RowStager, buffer: FrameBuffer, rows: torch.Tensor, *more: Any, **named: Any) -> None:
        really = lambda these: fill(stager, buffer, these, *more, **named)  # noqa: E731
        if done or rows.numel() < 2:
            really(rows)
        else:
            done.append(True)
            change(really, rows, buffer)

    RowStager.fill = filling  # type: ignore[method-assign]


def frame_taken() -> None:
    """A frame has a row less."""
    _first_frame(lambda fill, rows, _: fill(rows[1:]))


def frame_changed() -> None:
    """A frame has another bit in a weight, before its checksum is made."""

    def change(fill: Fill, rows: torch.Tensor, buffer: FrameBuffer) -> None:
        fill(rows)
        assert buffer.header is not None
        buffer.array[HEADER_LEN + buffer.header.section_offsets[1]] ^= 1
        buffer.payload_crc = None

    _first_frame(change)


TRAINED = {each.__name__: each for each in (mask_taken, frame_taken, frame_changed)}


# In the log.


def _of_the_second(frames: Frames) -> int:
    return next(n for n, (header, _) in enumerate(frames) if header.kind is Kind.ROWS and header.marker == 2)


def log_taken(frames: Frames) -> Frames:
    at = _of_the_second(frames)
    return [*frames[:at], *frames[at + 1 :]]


def log_changed(frames: Frames) -> Frames:
    at = _of_the_second(frames)
    header, payload = frames[at]
    changed = bytearray(payload)
    changed[header.section_offsets[1]] ^= 1
    return [*frames[:at], (header, bytes(changed)), *frames[at + 1 :]]


LOGGED = {each.__name__: each for each in (log_taken, log_changed)}


# Where a restore places them.


def _placing(change: Callable[[RowsView], RowsView]) -> None:
    """Of what marker 1:2 sent."""
    put = Target.put

    def putting(target: Target, move: Any, rows: RowsView, place: int = 0) -> int:
        return put(target, move, change(rows) if place == 1 and len(rows.ids) > 1 else rows, place)

    Target.put = putting  # type: ignore[method-assign]


def place_taken() -> None:
    """The last row of each frame is not written."""
    _placing(lambda rows: RowsView(rows.ids[:-1], rows.weights[:-1], tuple(state[:-1] for state in rows.states)))


def place_changed() -> None:
    """Weights are written into the row beside theirs."""
    _placing(lambda rows: replace(rows, weights=np.roll(rows.weights, 1, 0)))


PLACED = {each.__name__: each for each in (place_taken, place_changed)}


def _settings(folder: Path, subject: str) -> StreamConfig:
    return config(folder, proof_bytes=WINDOWS[subject])


def _said(subject: str, folder: Path, attack: str = "") -> list[str]:
    """As ``_restore``, the same on all ranks."""
    said = ranks.run(WORLDS[subject][1], _restore, subject, _settings(folder, subject), attack)
    assert all(each == said[0] for each in said)
    return said[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The log of a job that was not attacked, by subject."""
    folders: dict[str, Path] = {}

    def of(subject: str) -> Path:
        if subject not in folders:
            folders[subject] = tmp_path_factory.mktemp(subject)
            ranks.run(WORLDS[subject][0], _train, subject, _settings(folders[subject], subject), "")
        return folders[subject]

    return of


@pytest.mark.parametrize("subject", WORLDS)
def test_what_was_not_attacked_is_refused_nowhere(subject: str, whole: Callable[[str], Path], tmp_path: Path) -> None:
    said = _said(subject, shutil.copytree(whole(subject), tmp_path / "log"))
    shares = [float(each.removeprefix("proved ")) for each in said]
    assert len(shares) == len(MARKERS)
    assert shares[-1] > 0.9
    if subject == "plan":  # the other one has a block a table: both may be in one window
        assert shares[0] < 0.7, "a window that is nearly all of the job proves nothing of rounds"


SAMPLE = {
    *(("plan", "mask_taken"), ("plan", "frame_changed"), ("plan", "log_taken"), ("plan", "place_changed")),
    *(("collision", "frame_taken"), ("collision", "log_changed"), ("collision", "place_taken")),
}
"""Each attack once, and each place of attack on both subjects."""


@pytest.mark.parametrize(
    ("subject", "attack"),
    [pytest.param(*cell, marks=marks_of(cell, SAMPLE)) for cell in product(WORLDS, [*TRAINED, *LOGGED, *PLACED])],
)
def test_each_attack_is_found_within_one_round(
    subject: str, attack: str, whole: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    if attack in TRAINED:
        ranks.run(WORLDS[subject][0], _train, subject, _settings(folder, subject), attack)
    elif attack in LOGGED:
        forge(whole(subject), folder, on_rank_0(LOGGED[attack]))
    else:
        shutil.copytree(whole(subject), folder)
    *_, last = _said(subject, folder, attack if attack in PLACED else "")
    assert "of the live tables at a cut" in last
