"""The frame: what goes in comes out, and no damaged byte passes."""

from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, ROWWISE, rows_frame, table
from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError
from torchrec_stream_ckpt.format.frame import (
    ALIGNMENT,
    DATA_KINDS,
    DTYPE_BYTES,
    DTYPE_CODES,
    HEADER_LEN,
    MAX_FRAME_BYTES,
    MAX_SECTIONS,
    NEWEST_VERSION,
    PER_ROW,
    UNUSED_FIELDS,
    VERSION,
    Header,
    Kind,
    aligned,
    json_frame,
    parse_header,
    payload_of,
    seal,
)
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout, RowsView, decode_rows, distinct
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SECTIONS = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 65_535).map(lambda unit: unit * ALIGNMENT)), max_size=MAX_SECTIONS
)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    sections = draw(SECTIONS)
    kind = draw(st.sampled_from(Kind))
    header = Header(
        kind=kind,
        job=draw(st.binary(min_size=16, max_size=16)),
        generation=draw(st.integers(int(kind in DATA_KINDS), 2**32 - 1)),
        rank=draw(U32),
        seq=draw(U64),
        step=draw(U64),
        marker=draw(U64),
        table=draw(U32),
        rows=draw(U32),
        col0=draw(U32),
        cols=draw(U32),
        schema_crc=draw(U32),
        dtypes=tuple(code for code, _ in sections),
        section_offsets=tuple(offset for _, offset in sections),
        chain=draw(U32),
        version=VERSION if kind != Kind.PAD else NEWEST_VERSION,
    )
    unused = UNUSED_FIELDS.get(header.kind, ())
    plain = Header(header.kind, header.job, 0 if "generation" in unused else header.generation)
    for name in (*unused, *(["section_offsets"] if "dtypes" in unused else [])):
        setattr(header, name, getattr(plain, name))
    if header.kind not in (Kind.ROWS, Kind.IDS):
        header.table = plain.table
    return header


def small_frame() -> bytes:
    return bytes(json_frame(Header(Kind.MARK, JOB, 3, rank=1, seq=9, step=70, marker=2, chain=5), b'{"rows":1}'))


def read(frame: bytes) -> tuple[Header, bytes]:
    header = parse_header(frame)
    return header, bytes(payload_of(header, frame))


@given(headers(), st.binary(max_size=300))
def test_frame_reads_back_as_it_was_written(header: Header, payload: bytes) -> None:
    payload = payload.ljust(aligned(len(payload)), b"\0")
    header.payload_len = len(payload)
    frame = bytearray(HEADER_LEN) + payload
    seal(header, frame)
    assert read(bytes(frame)) == (header, payload)


@given(st.binary(max_size=400))
def test_json_frame_is_padded_with_spaces(text: bytes) -> None:
    header, payload = read(bytes(json_frame(Header(Kind.HELLO, JOB, 1), text)))
    assert payload == text.ljust(aligned(len(text)))
    assert header.payload_len % ALIGNMENT == 0


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        parse_header(data)


def test_every_flipped_bit_is_refused() -> None:
    good = small_frame()
    for position in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError):
                read(bytes(damaged))


def test_every_truncation_is_refused() -> None:
    good = small_frame()
    for length in range(len(good)):
        with pytest.raises(CorruptionError):
            read(good[:length])


def test_bytes_behind_a_frame_are_refused() -> None:
    with pytest.raises(CorruptionError, match="frame holds 128 payload bytes, but its header has 64"):
        read(small_frame() + bytes(64))


def test_header_is_trusted_without_its_payload() -> None:
    assert parse_header(small_frame()[:HEADER_LEN]).seq == 9


def test_largest_payload_fits_and_one_more_is_refused_by_writer_and_reader() -> None:
    largest = (MAX_FRAME_BYTES - HEADER_LEN) // ALIGNMENT * ALIGNMENT
    assert len(json_frame(Header(Kind.HELLO, JOB, 1), b" " * largest)) == MAX_FRAME_BYTES
    with pytest.raises(UnsupportedError, match="HELLO of 999873 bytes does not fit a frame"):
        json_frame(Header(Kind.HELLO, JOB, 1), b" " * (largest + 1))
    header = Header(Kind.HELLO, JOB, 1, payload_len=largest + ALIGNMENT)
    frame = bytearray(HEADER_LEN)
    header.pack_into(frame)
    with pytest.raises(CorruptionError, match="payload of 999936 bytes is larger than a frame may be"):
        parse_header(frame)


def test_a_newer_version_is_named_whatever_follows_it() -> None:
    frame = bytearray(small_frame())
    frame[4:6] = (7).to_bytes(2, "little")
    frame[6:] = bytes(len(frame) - 6)
    with pytest.raises(CorruptionError, match="format version 7, this program reads up to 4") as refused:
        parse_header(frame)
    assert refused.value.hint == "upgrade torchrec_stream_ckpt on the reading side"


def test_payload_error_says_where_the_frame_stands() -> None:
    frame = bytearray(small_frame())
    frame[-1] ^= 1
    with pytest.raises(CorruptionError) as refused:
        read(bytes(frame))
    assert refused.value.where == {"generation": 3, "rank": 1, "seq": 9}


@pytest.mark.parametrize("kind", sorted(DATA_KINDS))
def test_generations_of_a_data_partition_count_from_1(kind: Kind) -> None:
    with pytest.raises(CorruptionError, match=f"the header of {kind.name} has generation 0, expected 1 or more"):
        parse_header(json_frame(Header(kind, JOB, 0, version=NEWEST_VERSION if kind is Kind.PAD else VERSION), b""))


def test_header_crc_is_what_the_next_frame_chains_to() -> None:
    header = Header(Kind.MARK, JOB, 1)
    frame = json_frame(header, b"{}")
    assert header.header_crc == parse_header(frame).header_crc == crc32c(bytes(frame[:124]))


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_alignment_rounds_up(num_bytes: int, expected: int) -> None:
    assert aligned(num_bytes) == expected


# The payload of a ROWS frame: its layout follows from the schema, and nothing else is read.


DTYPES = st.sampled_from(sorted(DTYPE_CODES))
STATES = st.lists(st.builds(StateSpec, st.just("state"), DTYPES, st.booleans()), max_size=6)


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Any bits at all: NaNs with payloads and infinities too."""
    size = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    return np.frombuffer(np.random.default_rng(seed).bytes(size), NUMPY_DTYPES[dtype]).reshape(shape)


def rows_in(header: Header, frame: bytearray, spec: TableSpec) -> RowsView:
    seal(header, frame)
    parsed = parse_header(frame)
    return decode_rows(parsed, payload_of(parsed, frame), spec)


def user_frame(spec: TableSpec, ids: list[int]) -> tuple[Header, bytearray]:
    values = np.zeros((len(ids), spec.dim), np.float32)
    return rows_frame(spec, [np.array(ids), values, values[:, 0]])


@given(st.data(), st.integers(0, 40), st.integers(1, 9), DTYPES, STATES)
def test_rows_of_every_dtype_and_state_shape_read_back_bit_for_bit(
    data: st.DataObject, rows: int, cols: int, dtype: str, states: list[StateSpec]
) -> None:
    col0 = data.draw(st.integers(0, 3))
    spec = table("t", 1000, col0 + cols + data.draw(st.integers(0, 3)), dtype, *states)
    seed = data.draw(st.integers(0, 2**32))
    ids = np.random.default_rng(seed).choice(1000, rows, replace=False).astype(np.int64)
    arrays = [ids, random_bits((rows, cols), dtype, seed)]
    arrays += [random_bits((rows,) if s.per_row else (rows, cols), s.dtype, seed + i) for i, s in enumerate(states)]
    view = rows_in(*rows_frame(spec, arrays, cols=cols, col0=col0), spec)
    for found, written in zip((view.ids, view.weights, *view.states), arrays, strict=True):
        assert found.shape == written.shape
        assert found.tobytes() == written.tobytes()


@given(st.integers(1, 600), DTYPES, STATES)
def test_sections_are_aligned_apart_and_fit_a_frame(cols: int, dtype: str, states: list[StateSpec]) -> None:
    layout = RowLayout.of(table("t", 10, cols, dtype, *states), cols)
    for rows in (1, layout.max_rows):
        offsets, length = layout.offsets(rows)
        ends = [offset + rows * section.row_bytes for offset, section in zip(offsets, layout.sections, strict=True)]
        assert all(offset % 64 == 0 for offset in (*offsets, length))
        assert all(end <= following < end + 64 for end, following in zip(ends, [*offsets[1:], length], strict=True))
        assert HEADER_LEN + length <= MAX_FRAME_BYTES


def test_layout_of_a_table_with_one_value_a_row() -> None:
    layout = RowLayout.of(table("t", 8, 4, "float16", ROWWISE), 4)
    assert [section.code for section in layout.sections] == [6 | PER_ROW, 2, 1 | PER_ROW]
    assert layout.offsets(3) == ((0, 64, 128), 192)
    assert layout.offsets(0) == ((0, 0, 0), 0)


def test_more_states_than_a_frame_takes_are_refused() -> None:
    seven = [StateSpec(f"s{i}", "float32", True) for i in range(7)]
    with pytest.raises(ValueError, match=r"7 optimizer states do not fit a frame, which has space for 6"):
        RowLayout.of(table("t", 8, 4, "float32", *seven), 4)


def test_a_row_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="one row of 300000 columns does not fit a frame"):
        RowLayout.of(table("t", 8, 300_000), 300_000)


def test_a_header_with_a_row_larger_than_a_frame_is_damage() -> None:
    header, frame = user_frame(table("t", 8, 4, "float32", ROWWISE), [1])
    header.cols = 300_000
    with pytest.raises(CorruptionError, match="one row of 300000 columns does not fit"):
        rows_in(header, frame, table("t", 8, 300_000, "float32", ROWWISE))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("section_offsets", (0, 0, 128)),
        ("section_offsets", (0, 128, 64)),
        ("section_offsets", (0, 64, 128)),
        ("dtypes", (6 | PER_ROW, 2, 1 | PER_ROW)),
        ("dtypes", (6 | PER_ROW, 1, 1)),
        ("dtypes", (6, 1, 1 | PER_ROW)),
        ("rows", 0),
        ("rows", 100),
        ("rows", 2**32 - 1),
        ("cols", 3),
    ],
)
def test_sections_other_than_the_schemas_are_refused(field: str, value: object) -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    header, frame = user_frame(spec, [0, 1, 2, 3, 4])
    setattr(header, field, value)
    with pytest.raises(CorruptionError, match="sections do not match the schema"):
        rows_in(header, frame, spec)


def test_a_payload_longer_than_its_sections_is_refused() -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    header, frame = user_frame(spec, [0, 1])
    header.payload_len += 64
    with pytest.raises(CorruptionError, match="sections do not match the schema"):
        rows_in(header, frame + bytes(64), spec)


@pytest.mark.parametrize(
    "other",
    [
        table("t", 8, 4),
        table("t", 8, 4, "float16", ROWWISE),
        table("t", 8, 4, "float32", ROWWISE, ROWWISE),
        table("t", 8, 4, "float32", StateSpec("momentum1", "float32", False)),
    ],
)
def test_rows_of_another_table_are_refused(other: TableSpec) -> None:
    header, frame = user_frame(table("t", 8, 4, "float32", ROWWISE), [1, 2])
    with pytest.raises(CorruptionError, match="sections do not match the schema") as refused:
        rows_in(header, frame, other)
    assert refused.value.where["table"] == "t"


@pytest.mark.parametrize(("col0", "cols"), [(1, 4), (2**32 - 1, 4), (0, 0), (0, 5)])
def test_columns_outside_the_table_are_refused(col0: int, cols: int) -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    header, frame = user_frame(spec, [1])
    header.col0, header.cols = col0, cols
    with pytest.raises(CorruptionError, match="are outside dim 4"):
        rows_in(header, frame, spec)


@pytest.mark.parametrize("bad", [-1, 8, 2**62, -(2**63)])
def test_ids_outside_the_table_are_refused(bad: int) -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    with pytest.raises(CorruptionError, match=r"a row id is outside \[0, 8\)"):
        rows_in(*user_frame(spec, [3, bad]), spec)


def test_padding_is_not_read() -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    header, frame = user_frame(spec, [2])
    clean = rows_in(header, frame, spec)
    frame[HEADER_LEN + 8 : HEADER_LEN + 64] = b"\xee" * 56
    dirty = rows_in(header, frame, spec)
    assert dirty.ids.tobytes() == clean.ids.tobytes()
    assert dirty.weights.tobytes() == clean.weights.tobytes()


def test_a_frame_of_no_rows_is_a_frame() -> None:
    spec = table("t", 8, 4, "float32", ROWWISE)
    view = rows_in(*user_frame(spec, []), spec)
    assert (view.ids.shape, view.weights.shape, view.states[0].shape) == ((0,), (0, 4), (0,))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=20))
def test_distinct_ids_are_ascending_and_each_is_there_once(ids: list[int]) -> None:
    assert distinct(np.array(ids, np.int64)).tolist() == sorted(set(ids))
