"""A serving stream: what is lost, what is not, and that nobody but a follower takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.command import call, run
from tests.parts import CommitKey, FileLog, Update, UpdateKind
from tests.synthetic import PLAIN, SCHEMA, WIDE, Job, image_of_log
from torchrec_stream_ckpt import Follower, follow
from torchrec_stream_ckpt.errors import ConfigError, FencedError, ServingStreamError, UnsupportedError
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.extras.follower.serving import Encoding, decode, encode, served_schema
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

Tables = dict[str, np.ndarray]


class Finite:
    """Random bits of finite floats, of 2 or of 4 bytes."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def __getattr__(self, name: str) -> Any:
        return getattr(self._random, name)

    def bytes(self, length: int) -> bytes:
        data = self._random.integers(0, 256, length, np.uint8)
        data[1::2] = self._random.integers(0x2C, 0x3C, length // 2) + 0x80 * self._random.integers(0, 2, length // 2)
        return data.tobytes()


def some_rows() -> np.ndarray:
    rows = np.random.default_rng(3).normal(size=(200, 16)).astype(np.float32)
    rows[0] = 0.0
    rows[1] = 7.25
    rows[2] *= 1e30
    rows[3] *= 1e-30
    return rows


def test_int8_is_that_of_fbgemm() -> None:
    import fbgemm_gpu  # noqa: F401

    rows, table = some_rows(), served_schema(SCHEMA, "int8").tables[PLAIN]
    levels, scale, bias = encode(table, "int8", rows)
    fused = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(torch.from_numpy(rows)).numpy()
    assert levels.tobytes() == fused[:, :16].tobytes()
    assert np.stack([scale, bias], 1).tobytes() == np.ascontiguousarray(fused[:, 16:]).tobytes()


def test_the_error_of_int8_is_at_most_half_a_level() -> None:
    rows, table = some_rows()[4:], served_schema(SCHEMA, "int8").tables[PLAIN]
    levels, scale, bias = encode(table, "int8", rows)
    decoded = decode(table, RowsView(np.arange(len(rows)), levels, (scale, bias)))
    spans = rows.max(1) - rows.min(1)
    assert (np.abs(decoded - rows).max(1) <= spans / 510 * 1.0001).all()


def test_bf16_is_that_of_torch_and_keeps_what_is_no_number() -> None:
    bits = np.random.default_rng(5).integers(0, 2**32, (300, 8), np.uint64).astype(np.uint32)
    rows = bits.view(np.float32)
    rows[0] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.00390625, 1.01171875]
    (found,) = encode(served_schema(SCHEMA, "bf16").tables[PLAIN], "bf16", rows)
    expected = torch.from_numpy(rows.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(rows)
    assert (found[numbers] == expected[numbers]).all()
    decoded = decode(served_schema(SCHEMA, "bf16").tables[PLAIN], RowsView(np.arange(300), found, ()))
    assert (np.isnan(decoded) == ~numbers).all()
    normal = np.isfinite(decoded) & (np.abs(rows) >= np.finfo(np.float32).tiny)
    error = np.abs(decoded[normal].astype(np.float64) / rows[normal] - 1)
    assert 2**-9 < error.max() <= 2**-8


def test_under_bf16_the_greatest_values_become_infinities() -> None:
    table, limit = served_schema(SCHEMA, "bf16").tables[PLAIN], np.float32(2.0**127 * (2 - 2**-8))
    rows = np.array([[limit, np.nextafter(limit, np.float32(0)), -limit, np.finfo(np.float32).max]], np.float32)
    (found,) = encode(table, "bf16", rows)
    decoded = decode(table, RowsView(np.arange(1), found, ()))
    assert np.isinf(decoded).tolist() == [[True, False, True, True]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_int8_has_no_place_for_is_refused(bad: float) -> None:
    rows = np.zeros((2, 4), np.float32)
    rows[1, 2] = bad
    with pytest.raises(UnsupportedError, match="NaN or an infinity"):
        encode(served_schema(SCHEMA, "int8").tables[PLAIN], "int8", rows)


# A stream of it.


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "log")
    job.random = Finite(job.random)  # type: ignore[assignment]
    job.begin(splits=[1, 1, 2])
    return job


def apply(follower: Follower, tables: Tables) -> list[Update]:
    updates = []
    for update in follower.updates(0):
        for each in update.changes():
            assert (each.table.dtype, each.states) == ("float32", ())
            table = tables.setdefault(each.table.name, np.zeros((each.table.rows, each.table.dim), np.float32))
            table[each.ids, each.col0 : each.col0 + each.weights.shape[1]] = each.weights
        updates.append(update)
    return updates


def encoded(job: Job, marker: MarkerId, encoding: Encoding) -> Tables:
    """The marker's tables, encoded and decoded as whole tables."""
    image, found = image_of_log(job.log, Control(job.log).refresh(), marker), {}
    for index, table in enumerate(served_schema(SCHEMA, encoding).tables):
        raw = np.ascontiguousarray(image.arrays[index, 0][:, :, :-1])
        weights = raw.view(np.float16 if index == WIDE else np.float32)[:, :, 0].astype(np.float32)
        sections = encode(table, encoding, weights)
        found[table.name] = decode(table, RowsView(np.arange(table.rows), sections[0], tuple(sections[1:])))
    return found


def same(left: Tables, right: Tables) -> bool:
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.mark.parametrize("encoding", ["int8", "bf16"])
def test_replicas_of_a_serving_stream_have_each_marker_encoded(job: Job, encoding: Encoding, tmp_path: Path) -> None:
    out, tables = f"file://{tmp_path / 'out'}", {}
    older = job.commit(time_s=77.0)
    with (
        follow(f"file://{job.root}", scratch=tmp_path) as trainer,
        follow(out, scratch=tmp_path) as replica,
    ):
        publisher, sizes = ServingWriter(out, encoding), []

        def publish() -> list[Update]:
            sizes.extend(publisher.put(update) for update in trainer.updates(0))
            return apply(replica, tables)

        (update,) = publish()
        assert (update.kind, update.origin, update.step, update.commit.time_s) == (UpdateKind.LOAD, "1:1", 10, 77.0)
        assert same(tables, encoded(job, older.id, encoding))
        for number in (2, 3):
            job.touch(1)
            marker = job.commit()
            (update,) = publish()
            assert (update.kind, update.origin) == (UpdateKind.MARKER, f"1:{number}")
            assert same(tables, encoded(job, marker.id, encoding))
        job.begin(older.id)  # a branch: all rows again, in a generation of its own
        marker = job.commit()
        (update,) = publish()
        assert (update.kind, update.origin, str(update.marker)) == (UpdateKind.LOAD, "2:1", "2:1")
        assert same(tables, encoded(job, marker.id, encoding))
        publisher.close()
    assert max(sizes[1:3]) < sizes[0]


@pytest.fixture
def serving(job: Job, tmp_path: Path) -> str:
    job.commit()
    out = f"file://{tmp_path / 'out'}"
    run("follow", f"file://{job.root}", "--once", "--serve", out)
    return out


VERBS: list[Callable[[str], list[str]]] = [
    lambda uri: ["list", uri],
    lambda uri: ["show", uri],
    lambda uri: ["verify", uri],
    lambda uri: ["materialize", uri, "--once"],
    lambda uri: ["export", uri, "--to", f"safetensors://{uri.removeprefix('file://')}-tables"],
    lambda uri: ["fence", uri, "--yes"],
]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb("file://x")[0])
def test_nobody_but_a_follower_takes_a_serving_stream(verb: Callable[[str], list[str]], serving: str) -> None:
    done = call(*verb(serving))
    assert isinstance(done.exception, ServingStreamError)
    assert "lossy" in str(done.exception)


def test_a_trainers_log_is_not_served_to(job: Job, serving: str, tmp_path: Path) -> None:
    with follow(f"file://{job.root}", scratch=tmp_path) as follower:
        publisher = ServingWriter(f"file://{job.root}", "bf16")
        with pytest.raises(ConfigError, match="a trainer writes to this one"):
            publisher.put(next(follower.updates(0)))
    done = call("follow", f"file://{job.root}", "--serve", f"file://{job.root}")
    assert isinstance(done.exception, ConfigError)


def test_a_second_publisher_fences_the_first(job: Job, serving: str, tmp_path: Path) -> None:
    with follow(f"file://{job.root}", scratch=tmp_path) as follower:
        first, second = ServingWriter(serving, "bf16"), ServingWriter(serving, "bf16")
        updates = follower.updates(0)
        update = next(updates)
        first.put(update)
        second.put(update)
        job.touch()
        job.commit()
        with pytest.raises(FencedError):
            first.put(next(updates))
        first.close()
        second.close()


def test_dense_state_of_a_serving_stream_is_refused(serving: str, tmp_path: Path) -> None:
    with (
        follow(serving, scratch=tmp_path) as follower,
        pytest.raises(ConfigError, match="has no dense state"),
    ):
        next(follower.updates(0)).dense()


def test_a_serve_record_in_a_signed_log_hides_nothing(job: Job, serving: str, tmp_path: Path) -> None:
    """Who may append, but has no key, cannot keep those who have it from reading."""
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key").chmod(0o600)
    key = CommitKey.load(tmp_path / "key")
    signed = FileLog(tmp_path / "signed")
    signed.prepare(1)
    (_, claim), *_ = job.log.read_control()
    signed.append_control(key.sign(parse_control(claim)).to_frame())  # type: ignore[type-var]
    (_, serve), *_ = FileLog(tmp_path / "out").read_control()
    signed.append_control(serve)
    lineage = Control(signed, tmp_path / "key").refresh()
    assert (list(lineage.claims), lineage.unsigned) == ([1], 1)
    with pytest.raises(ServingStreamError):
        Control(signed).refresh()
