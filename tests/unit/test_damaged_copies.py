"""Damage to the second copy of control records, and to ``STORE``: named, and repaired where that is provable."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.builders import JOB
from tests.parts import FileLog, app
from tests.unit.copied_job import copied, key, offsets, recover, trainer
from torchrec_stream_ckpt.cli import verify
from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.store.records import Copied, damaged_copies, put_copy
from torchrec_stream_ckpt.util.layout import STORE_FILE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folded job whose control records are copied: one object for each record, and one for all but two of them."""
    root = copied(tmp_path, dense=True)
    stores.fold(root)
    objects, log = open_store(str(root)), key(root)
    for name in Copied.load(objects, JOB, log).names:
        objects.delete(name.name)
    entries = list(FileLog(root).read_control())
    put_copy(objects, JOB, log, 1, entries[:-2])
    for each in entries[-2:]:
        put_copy(objects, JOB, log, 1, [each])
    assert damaged_copies(objects, JOB) == []
    return root


def records(root: Path) -> list[Path]:
    return sorted((root / "records").rglob("*-e*"))


def flip(path: Path, place: int) -> bytes:
    whole = path.read_bytes()
    place %= len(whole)
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
    return whole


def scrub(root: Path, *more: str) -> tuple[int, list[dict[str, Any]]]:
    done = CliRunner().invoke(app, ["scrub", f"file://{root}", "--store", str(root), "--json", "--anew", *more])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    damaged: list[dict[str, Any]] = json.loads(done.stdout)[0]["damaged"]
    return done.exit_code, [each for each in damaged if each["name"].startswith("records/")]


def verified(root: Path) -> tuple[int, str]:
    with patch.object(verify, "find_spec", return_value=None):  # the dense state is not a real one
        done = CliRunner().invoke(app, ["verify", f"file://{root}", "--store", str(root)], catch_exceptions=False)
    return done.exit_code, done.stderr


@pytest.mark.parametrize("number", [0, 2], ids=["many records", "one record"])
@pytest.mark.parametrize("place", [0, 12, 60, -1], ids=["offset", "header", "payload", "end"])
def test_a_flipped_byte_is_named_and_written_again_from_the_log(root: Path, number: int, place: int) -> None:
    path = records(root)[number]
    name = str(path.relative_to(root))
    whole = flip(path, place)
    status, said = verified(root)
    assert status == 1
    assert "the second copy of control records is damaged" in said
    assert name in said
    assert "--repair" in said
    (damage,) = scrub(root)[1]
    assert (damage["name"], damage["state"]) == (name, "damaged")
    (damage,) = scrub(root, "--repair")[1]
    assert (damage["name"], damage["state"], damage["source"]) == (name, "repaired", "the log")
    assert path.read_bytes() == whole
    assert (root / "damaged" / name).exists()
    assert verified(root)[0] == 0
    assert scrub(root)[1] == []


def test_what_the_log_cannot_prove_stays_and_is_named_with_the_command_that_helps(root: Path) -> None:
    """A merged object that was cut: it may have had fewer records. A record that the log has lost. Another log's."""
    many, _, last = records(root)
    objects, before = open_store(str(root)), {path: path.read_bytes() for path in records(root)}

    def is_lost(path: Path, why: str) -> None:
        harmed = path.read_bytes()
        (damage,) = scrub(root, "--repair")[1]
        assert damage["state"] == "lost"
        assert why in damage["lost"]
        assert "stream-ckpt recover URI --store URL" in damage["lost"]
        assert path.read_bytes() == harmed
        path.write_bytes(before.get(path, b""))

    many.write_bytes(before[many][:-3])
    is_lost(many, "it had other records than the log has at these offsets")
    with (root / "control.log").open("r+b") as control:
        whole = control.read()
        control.truncate(offsets(root)[-1])
    flip(last, 60)
    is_lost(last, f"the log has no such record at offset {len(whole) - len(before[last]) + 8}")
    (root / "control.log").write_bytes(whole)
    other = put_copy(objects, JOB, "0" * 8, 1, list(FileLog(root).read_control()))
    before[root / other.name] = (root / other.name).read_bytes()
    flip(root / other.name, 60)
    is_lost(root / other.name, "it is a copy of another log")
    assert damaged_copies(objects, JOB) == []


def test_the_first_object_of_an_epoch_is_copied_again_by_recover(root: Path) -> None:
    """Its offsets give only an order: the log has other records there."""
    with closing(trainer(root)) as control:
        control.refresh()
        assert control.copies is not None
    for path in records(root):
        path.unlink()
    recover(root)
    (path,) = records(root)
    flip(path, 60)
    (damage,) = scrub(root, "--repair")[1]
    assert damage["state"] == "lost"
    recover(root)
    assert verified(root)[0] == 0


@pytest.mark.parametrize("place", [0, 3, 10, 12])
def test_a_format_of_which_one_byte_was_altered_is_put_back(root: Path, place: int) -> None:
    whole = flip(root / STORE_FILE, place)
    with pytest.raises(CorruptionError, match="does not state the format") as no:
        scrub(root)
    assert "scrub URI --store URL --repair" in no.value.hint
    assert scrub(root, "--repair") == (0, []) or place == 10
    assert (root / STORE_FILE).read_bytes() == whole
    assert (root / "damaged" / STORE_FILE).exists()


@pytest.mark.parametrize("said", [b'{"format": 5}', b'{"fXrmat": 5}', b'{"format": 1', b"", b'{"format": 12}'])
def test_a_format_that_may_be_a_newer_ones_is_left_alone(root: Path, said: bytes) -> None:
    (root / STORE_FILE).write_bytes(said)
    with pytest.raises((CorruptionError, UnsupportedError), match="format") as no:
        scrub(root, "--repair")
    assert '{"format": 1}' in no.value.hint
    assert (root / STORE_FILE).read_bytes() == said
