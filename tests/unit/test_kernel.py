"""The native kernel against numpy and crc32c, byte by byte, and what happens where it cannot run."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.format import proof
from torchrec_stream_ckpt.native import build, kernel
from torchrec_stream_ckpt.native.kernel import PATHS, Column, Kernel

Bytes = npt.NDArray[np.uint8]
FUZZ = Path(__file__).parents[1] / "fuzz" / "kernel_fuzz.c"
WIDTHS = (1, 2, 4, 12, 31, 32, 64, 96, 128, 192, 256, 400, 512, 1024, 9000)


@pytest.fixture(scope="module", params=PATHS)
def native(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """The kernel on each path that this processor has."""
    found, reason = kernel.load(wanted=request.param)
    if found is None or found.path != request.param:
        pytest.skip(f"native kernel: {reason}; this processor and build have no path {request.param}")
    yield found
    kernel.load()  # the path is one for all of the library


@pytest.fixture
def compiler() -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc): the native kernel cannot be built here")
    return "cc"


def memory(num_bytes: int, offset: int, seed: int) -> Bytes:
    """Random bytes at an address that is ``offset`` above a multiple of 64."""
    area = np.random.default_rng(seed).integers(0, 256, num_bytes + 128, dtype=np.uint8)
    begin = -area.ctypes.data % 64 + offset
    return area[begin : begin + num_bytes]


@given(
    length=st.one_of(st.integers(0, 700), st.integers(0, 40_000)),
    offset=st.integers(0, 63),
    seed=st.integers(0, 2**32 - 1),
)
def test_checksums_are_those_of_the_library(native: Kernel, length: int, offset: int, seed: int) -> None:
    data = memory(length, offset, seed)
    assert native.crc(data.ctypes.data, length, seed) == crc32c(data.data, seed)


@pytest.mark.parametrize("length", [100, kernel.LARGE, kernel.LARGE + 5])
def test_a_checksum_is_the_same_by_the_kernel_and_without(
    native: Kernel, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memoryview(memory(length, 3, 1).tobytes())
    expected = crc32c(data, 7)
    monkeypatch.setattr(kernel, "kernel", lambda: native)
    for paths in ((), PATHS):
        monkeypatch.setattr(kernel, "FASTER_THAN_CRC32C", paths)
        assert kernel.checksum(data, 7) == expected


def test_the_checksum_of_nine_digits_is_the_one_of_the_rfc(native: Kernel) -> None:
    digits = np.frombuffer(b"123456789", np.uint8)
    assert native.crc(digits.ctypes.data, 9) == 0xE3069283


@st.composite
def tables(draw: Any) -> tuple[list[Bytes], int]:
    """Live tensors as bytes, shape (rows, bytes of a row), some with a gap between rows; and their number of rows."""
    rows = draw(st.integers(1, 300))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        width, gap = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from((0, 0, 4, 64)))
        area = memory(rows * (width + gap), draw(st.sampled_from((0, 16, 4, 1))), draw(st.integers(0, 2**32 - 1)))
        found.append(area.reshape(rows, width + gap)[:, :width])
    return found, rows


def columns_of(live: list[Bytes], packed: list[Bytes]) -> Any:
    pairs = zip(live, packed, strict=True)
    return (Column * len(live))(
        *(Column(a.ctypes.data, a.strides[0], b.ctypes.data, b.strides[0], a.shape[1]) for a, b in pairs)
    )


def sections(payload: Bytes, count: int, widths: list[int]) -> list[Bytes]:
    """The sections of a payload after its ids, each at a multiple of 64 bytes."""
    found, begin = [], -(-8 * count // 64) * 64
    for width in widths:
        found.append(payload[begin : begin + count * width].reshape(count, width))
        begin += -(-count * width // 64) * 64
    return found


def payload_bytes(count: int, widths: list[int]) -> int:
    return sum(-(-count * width // 64) * 64 for width in (8, *widths))


@given(table=tables(), row0=st.integers(0, 2**40), offset=st.sampled_from((0, 16, 3)), data=st.data())
def test_a_gather_is_that_of_numpy(
    native: Kernel, table: tuple[list[Bytes], int], row0: int, offset: int, data: st.DataObject
) -> None:
    live, rows = table
    picked = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=2 * rows)), np.int64)
    count, widths = len(picked), [each.shape[1] for each in live]
    payload = memory(payload_bytes(count, widths), offset, 1)
    expected = payload.copy()
    expected[: 8 * count] = (picked + row0).view(np.uint8)
    for source, target in zip(live, sections(expected, count, widths), strict=True):
        target[:] = source[picked]
    columns = columns_of(live, sections(payload, count, widths))
    crc = native.gather(payload.ctypes.data, len(payload), picked.ctypes.data, count, row0, rows, columns)
    assert payload.tobytes() == expected.tobytes()
    assert crc == crc32c(expected.data)


@given(bad=st.one_of(st.integers(-(2**63), -1), st.integers(50, 2**63 - 1)), at=st.integers(0, 9))
def test_a_gather_reads_no_row_outside_the_tensors(native: Kernel, bad: int, at: int) -> None:
    live = [memory(50 * 64, 0, 1).reshape(50, 64)]
    picked = np.arange(10)
    picked[at] = bad
    payload = np.zeros(payload_bytes(10, [64]), np.uint8)
    columns = columns_of(live, sections(payload, 10, [64]))
    assert native.gather(payload.ctypes.data, len(payload), picked.ctypes.data, 10, 0, 50, columns) is None
    assert not payload[128:].any()


@given(table=tables(), first=st.integers(0, 2**40), data=st.data())
def test_rows_are_placed_as_by_numpy(
    native: Kernel, table: tuple[list[Bytes], int], first: int, data: st.DataObject
) -> None:
    """Only those that are wanted; ids of other shards, and ids that are none, change nothing."""
    live, rows = table
    near = st.integers(first - 100, first + rows + 100)
    ids = np.array(data.draw(st.lists(st.one_of(near, st.integers(-(2**63), 2**63 - 1)), unique=True)), np.int64)
    begin = data.draw(st.integers(0, rows))
    wanted = data.draw(st.integers(0, rows - begin))
    row0, place = first + begin, data.draw(st.integers(-1, 5))
    count, widths = len(ids), [each.shape[1] for each in live]
    packed = sections(memory(payload_bytes(count, widths), data.draw(st.sampled_from((0, 3))), 2), count, widths)
    first_block, blocks = first // 64, (first + rows - 1) // 64 - first // 64 + 1
    sent = np.arange(blocks, dtype=np.int32) % 4 - 1
    arrived = [np.zeros(rows, np.bool_) for _ in range(data.draw(st.integers(1, 3)))]

    chosen = np.flatnonzero((ids >= row0) & (ids < row0 + wanted))
    local = ids[chosen] - first
    expected, flags, newest = [each.copy() for each in live], np.zeros(rows, np.bool_), sent.copy()
    for target, source in zip(expected, packed, strict=True):
        target[local] = source[chosen]
    flags[local] = True
    np.maximum.at(newest, ids[chosen] // 64 - first_block, np.int32(place))

    columns = columns_of(live, packed)
    flagged = [each.ctypes.data for each in arrived]
    written = native.place(
        *(ids.ctypes.data, count, row0, wanted, first, columns, flagged, sent.ctypes.data, 6, first_block, place)
    )
    assert written == len(chosen)
    assert [each.tobytes() for each in live] == [each.tobytes() for each in expected]
    assert all((each == flags).all() for each in arrived)
    assert (sent == newest).all()


@given(
    width=st.sampled_from((1, 2, 4)),
    rows=st.integers(0, 90),
    words=st.integers(0, 130),
    offset=st.integers(0, 15),
    picks=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_digests_of_rows_are_those_of_numpy(
    native: Kernel, width: int, rows: int, words: int, offset: int, picks: bool, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    values = memory(rows * words * width, offset * width, seed).view(f"<i{width}").reshape(rows, words)
    columns, keys = (draw.integers(-(2**63), 2**63 - 1, size) for size in (words, rows))
    found = np.full(rows + 1, 7)
    addresses = (each.ctypes.data for each in (columns, keys, found))
    picked = draw.integers(0, max(1, rows), rows)
    native.digest(values.ctypes.data, width, picked.ctypes.data if picks else None, rows, words, *addresses)
    expected = [
        sum(int(value) * int(key) for value, key in zip(row, columns, strict=True)) * int(key) % 2**64
        for row, key in zip(values[picked] if picks else values, keys, strict=True)
    ]
    assert [int(each) % 2**64 for each in found[:-1]] == expected
    assert found[-1] == 7


@given(
    width=st.sampled_from((1, 2, 4)),
    rows=st.integers(1, 200),
    words=st.integers(1, 130),
    gap=st.sampled_from((0, 3)),
    picks=st.sampled_from((None, 0, 1, 250)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_digest_is_the_same_by_the_kernel_and_without(
    native: Kernel, width: int, rows: int, words: int, gap: int, picks: int | None, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    values = memory(rows * (words + gap) * width, 0, seed).view(f"<i{width}").reshape(rows, words + gap)[:, :words]
    index = None if picks is None else draw.integers(0, rows, 2 * picks)[::2]
    sizes = words, draw.choice((1, rows if picks is None else picks))
    columns, keys = (draw.integers(-(2**63), 2**63 - 1, 2 * size)[::2] for size in sizes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernel, "DIGESTS_FASTER", PATHS)
        patched.setattr(proof, "kernel", lambda: native)
        found = proof.digest_rows(values, columns, keys, index)
        patched.setattr(proof, "_CHUNK_BYTES", 8 * words * 7)
        patched.setattr(proof, "kernel", lambda: None)
        assert found.tolist() == proof.digest_rows(values, columns, keys, index).tolist()


@given(
    length=st.one_of(st.integers(0, 300), st.integers(0, 40_000)),
    to=st.integers(0, 63),
    begin=st.integers(0, 63),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_copy_has_all_bytes_and_touches_no_other(native: Kernel, length: int, to: int, begin: int, seed: int) -> None:
    source, area = memory(length, begin, seed), memory(length + 128, 0, seed + 1)
    expected = area.copy()
    expected[to : to + length] = source
    native.copy(area.ctypes.data + to, source.ctypes.data, length)
    assert area.tobytes() == expected.tobytes()


# Where it cannot run.


def test_an_older_library_without_digests_and_copies_is_used_for_all_else(compiler: str, tmp_path: Path) -> None:
    source = build.SOURCE.read_text()
    for added in ("digest_rows", "copy"):
        source = source.replace(f"stream_ckpt_{added}", f"stream_ckpt_other_{added}")
    (tmp_path / "kernel.c").write_text(source)
    library = tmp_path / "libkernel.so"
    subprocess.run([compiler, *build.FLAGS, "-o", library, tmp_path / "kernel.c"], check=True)
    found, reason = kernel.load(library)
    assert found is not None, reason
    assert not found.digests
    assert not found.copies
    values, keys = np.arange(6000, dtype=np.int32).reshape(100, 60), np.arange(100)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(proof, "kernel", lambda: found)
        assert proof.digest_rows(values, np.arange(60), keys)[1] == sum((60 + at) * at for at in range(60))


def test_a_library_of_another_version_is_refused_by_name(
    compiler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "libkernel.so"
    (tmp_path / "kernel.c").write_text("int stream_ckpt_abi(void) { return 99; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", other, tmp_path / "kernel.c"], check=True)
    with caplog.at_level(logging.WARNING):
        found, reason = kernel.load(other)
    assert found is None
    assert reason == f"{other} has version 99, this package needs {kernel.ABI}"
    assert [record.getMessage() for record in caplog.records] == [f"native kernel: {reason}; {build.WITHOUT}"]


def test_a_file_that_is_no_library_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "libkernel.so").write_bytes(b"not a library")
    found, reason = kernel.load(tmp_path / "libkernel.so")
    assert found is None
    assert reason.startswith("libkernel.so cannot be loaded: ")
    assert len(caplog.records) == 1


def test_without_a_library_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kernel.load(tmp_path / "libkernel.so") == (None, "it was not compiled")
    assert not caplog.records


def test_a_path_that_the_processor_lacks_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the library: its processor has SSE4.2 alone, and computes right checksums."""

    class Answer:
        def __init__(self, answer: Any) -> None:
            self.answer = answer

        def __call__(self, *given: Any) -> Any:
            return self.answer(*given)

    class Library:
        stream_ckpt_abi = Answer(lambda: kernel.ABI)
        stream_ckpt_use = Answer(lambda number: 0 if PATHS[number] in ("plain", "sse42") else -1)
        stream_ckpt_crc, stream_ckpt_gather, stream_ckpt_place = Answer(None), Answer(None), Answer(None)

    monkeypatch.setattr(kernel.ctypes, "CDLL", lambda _: Library())
    monkeypatch.setattr(kernel, "_is_right", lambda _: True)
    here = Path(__file__)
    assert [kernel.load(here, wanted)[1] for wanted in ("", "avx512", "plain")] == [
        "path sse42",
        "path sse42",
        "path plain",
    ]


def test_a_path_with_wrong_checksums_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    best, reason = kernel.load()
    if best is None or best.path == "plain":
        pytest.skip(f"native kernel: {reason}")
    right = kernel._is_right
    monkeypatch.setattr(kernel, "_is_right", lambda found: found.path != best.path and right(found))
    found, _ = kernel.load()
    assert found is not None
    assert PATHS.index(found.path) < PATHS.index(best.path)
    assert f"path {best.path} computes wrong checksums" in caplog.text
    kernel.load()


def test_the_environment_chooses_and_a_wrong_name_is_an_error() -> None:
    program = "from torchrec_stream_ckpt.native.kernel import describe; print(describe())"
    said = {}
    for wanted in ("off", "plain", "fast"):
        environment = {**os.environ, kernel.VARIABLE: wanted}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
        )
        said[wanted] = done.stdout.strip() or done.stderr.strip().splitlines()[-2]
    assert said["off"] == f"none ({kernel.VARIABLE} is off)"
    assert said["plain"] in ("plain", "none (it was not compiled)")
    assert said["fast"].endswith(f"{kernel.VARIABLE} must be off or one of {', '.join(PATHS)}, got 'fast'")
    with pytest.raises(ConfigError):
        kernel.load(wanted="fast")


def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    assert build.build(tmp_path / "libkernel.so") == f"no C compiler: {tmp_path}/nothing: No such file or directory"
    assert list(tmp_path.iterdir()) == []


def test_the_source_compiles_without_a_warning(compiler: str, tmp_path: Path) -> None:
    assert build.build(tmp_path / "libkernel.so", (*build.FLAGS, "-Werror")) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["libkernel.so"]


@pytest.mark.slow
def test_random_calls_touch_no_byte_beside_their_own(compiler: str, tmp_path: Path) -> None:
    """Under sanitizers, on every path of this processor; each time with other calls."""
    program, seed = tmp_path / "fuzz", random.SystemRandom().randrange(2**31)
    flags = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    made = subprocess.run([compiler, *flags, "-o", program, FUZZ], capture_output=True, text=True, check=False)
    if "asan" in made.stderr or "ubsan" in made.stderr:
        pytest.skip(f"the sanitizers' libraries are missing: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stderr
    ran = subprocess.run([program, str(seed), "1000"], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr}"
    assert "path 0: 1000 calls" in ran.stdout
