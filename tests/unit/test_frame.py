"""The frame: what goes in comes out, and no damaged byte passes."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB
from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError
from torchrec_stream_ckpt.format.frame import (
    ALIGNMENT,
    DATA_KINDS,
    HEADER_LEN,
    MAX_FRAME_BYTES,
    MAX_SECTIONS,
    NEWEST_VERSION,
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
