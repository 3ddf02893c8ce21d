"""Names of logs, stores, segments and dense directories: made and parsed in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.layout import (
    FileUri,
    KafkaUri,
    dense_name,
    fsync_dir,
    parse_segment,
    parse_store,
    parse_uri,
    partition_dir,
    segment_name,
)
from torchrec_stream_ckpt.types import MarkerId


@pytest.mark.parametrize("uri", ["file:///data/log", "file:///data/with space", "file:///"])
def test_file_uris_read_and_print_the_same(uri: str) -> None:
    parsed = parse_uri(uri)
    assert isinstance(parsed, FileUri)
    assert str(parsed) == uri


def test_a_relative_file_uri_is_below_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_uri("file://log/job") == FileUri(tmp_path / "log" / "job")


@pytest.mark.parametrize(
    ("uri", "brokers", "job"),
    [
        ("kafka://host:9092/job", "host:9092", "job"),
        ("kafka://a:1,b.example:65535/Job-1.x_y", "a:1,b.example:65535", "Job-1.x_y"),
        ("kafka://[::1]:9092/job", "[::1]:9092", "job"),
        ("kafka://127.0.0.1:9092/" + "j" * 200, "127.0.0.1:9092", "j" * 200),
    ],
)
def test_kafka_uris_name_brokers_and_job(uri: str, brokers: str, job: str) -> None:
    parsed = parse_uri(uri)
    assert parsed == KafkaUri(brokers, job)
    assert str(parsed) == uri
    assert isinstance(parsed, KafkaUri)
    assert (parsed.data_topic, parsed.control_topic) == (f"{job}.data", f"{job}.control")


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "log",
        "/data/log",
        "file:",
        "file:/data",
        "file://",
        "http://host/x",
        "FILE:///x",
        "kafka://",
        "kafka:///job",
        "kafka://host/job",
        "kafka://host:/job",
        "kafka://host:port/job",
        "kafka://host:9092",
        "kafka://host:9092/",
        "kafka://host:9092/a/b",
        "kafka://host:9092/.job",
        "kafka://host:9092/job name",
        "kafka://host:9092/job\n",
        "kafka://host:9092/" + "j" * 201,
        "kafka://a:1,,b:2/job",
        "kafka://a:1, b:2/job",
        "kafka://user@:9092:1/job",
    ],
)
def test_other_uris_are_refused_with_a_hint(uri: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_uri(uri)
    assert refused.value.hint


@pytest.mark.parametrize("store", ["/data/store", "file:///data/store"])
def test_stores_are_folders(store: str) -> None:
    assert parse_store(store) == Path("/data/store")


@pytest.mark.parametrize("store", ["s3://bucket/x", "file://", "kafka://host:1/job"])
def test_other_stores_are_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="is not a store that dense state can go to"):
        parse_store(store)


@given(st.integers(0, 99_999_999), st.integers(0, 10**20 - 1))
def test_segment_names_parse_and_sort_by_offset(generation: int, base: int) -> None:
    assert parse_segment(segment_name(generation, base)) == (generation, base)
    assert segment_name(generation, base) <= segment_name(generation, min(base + 1, 10**20 - 1))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "LOG",
        "g1-0.seg",
        segment_name(1, 0) + ".tmp",
        "x" + segment_name(1, 0),
        segment_name(1, 0)[:-4],
        segment_name(1, 0) + "\n",
        segment_name(100_000_000, 0),
    ],
)
def test_other_names_are_no_segments(name: str) -> None:
    assert parse_segment(name) is None


def test_partitions_and_dense_directories_have_fixed_names() -> None:
    assert partition_dir(Path("/log"), 7) == Path("/log/data/p00007")
    assert dense_name(bytes(range(16)), MarkerId(2, 17)) == (
        "dense/000102030405060708090a0b0c0d0e0f/g00000002-m00000017"
    )


def test_dense_names_of_different_markers_differ() -> None:
    markers = [MarkerId(1, 1), MarkerId(1, 11), MarkerId(11, 1), MarkerId(1, 10**8), MarkerId(10**8, 1)]
    assert len({dense_name(bytes(16), marker) for marker in markers}) == len(markers)


def test_syncing_a_folder_that_is_gone_fails(tmp_path: Path) -> None:
    fsync_dir(tmp_path)
    with pytest.raises(FileNotFoundError):
        fsync_dir(tmp_path / "gone")


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**18 - 1))
def test_marker_names_read_back(generation: int, marker: int) -> None:
    assert MarkerId.parse(str(MarkerId(generation, marker))) == MarkerId(generation, marker)


@pytest.mark.parametrize("text", ["", "1", ":", "1:", ":1", "1:2:3", "-1:2", "1:+2", "1 :2", "a:b", "1:2\n"])
def test_other_names_of_markers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a marker") as refused:
        MarkerId.parse(text)
    assert refused.value.hint == "write it as GENERATION:MARKER, for example 2:17"


def test_markers_sort_by_generation_first() -> None:
    assert sorted([MarkerId(2, 1), MarkerId(1, 9), MarkerId(1, 2)]) == [MarkerId(1, 2), MarkerId(1, 9), MarkerId(2, 1)]
