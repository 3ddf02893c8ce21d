"""Damage of the control log: it is refused with its place, and with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts import FileLog
from tests.stores import History
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import CONTROL_FILE


@pytest.mark.parametrize(
    ("number", "offset", "hint"),
    [
        (0, 3, "check that this log or topic belongs to the job"),
        (1, 3, "stream-ckpt recover file://{folder} --store file://{folder}"),
        (1, 40, "stream-ckpt recover NEW_URI --store file://{folder}"),
        (1, HEADER_LEN + 5, "move {folder}/control.log aside"),
    ],
)
def test_a_changed_byte_of_the_control_log_is_refused_with_what_to_do(
    tmp_path: Path, number: int, offset: int, hint: str
) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 4))
    path = tmp_path / CONTROL_FILE
    records = [at for at, _ in history.log.read_control()]
    data = bytearray(path.read_bytes())
    data[records[number] + offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError) as refused:
        Control(FileLog(tmp_path)).refresh()
    where = refused.value.where
    assert str(where.get("offset", where.get("control_offset"))) == str(records[number])
    assert hint.format(folder=tmp_path) in refused.value.hint
