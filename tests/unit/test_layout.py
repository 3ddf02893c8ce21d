"""Names of logs, stores, segments and dense directories: made and parsed in one place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.durable import fsync_dir
from torchrec_stream_ckpt.util.layout import (
    FoldName,
    StoreSegment,
    dense_file_name,
    dense_name,
    dropped_name,
    is_object_name,
    manifest_name,
    parse_dense_file,
    parse_dropped_name,
    parse_fold_name,
    parse_fold_segment,
    parse_manifest_name,
    parse_segment,
    parse_store_segment,
    partition_dir,
    segment_name,
)
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import FileUri, KafkaUri, check_store_url, parse_uri


@pytest.mark.parametrize("uri", ["file:///data/log", "file:///data/with space", "file:///"])
def test_file_uris_read_and_print_the_same(uri: str) -> None:
    parsed = parse_uri(uri)
    assert isinstance(parsed, FileUri)
    assert str(parsed) == uri


def test_localhost_and_the_home_folder_are_not_folders_of_these_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    for place, path in (("localhost/a/b", "/a/b"), ("~/a", "/home/ann/a"), ("~", "/home/ann")):
        assert str(parse_uri(f"file://{place}")) == f"file://{path}"
        assert str(check_store_url(f"file://{place}")) == f"file://{path}"
    assert str(check_store_url("~/a")) == "file:///home/ann/a"
    assert str(parse_uri("file:///a/~/b")) == "file:///a/~/b"


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


JOBS = st.binary(min_size=16, max_size=16)
MARKERS = st.builds(MarkerId, st.integers(0, 10**12), st.integers(0, 10**12))
PARTS = st.integers(0, 10**6)


@given(JOBS, MARKERS, st.integers(0, 10**6), PARTS)
def test_names_of_store_segments_are_parsed_as_they_were_made(
    job: bytes, marker: MarkerId, rank: int, part: int
) -> None:
    segment = StoreSegment(job, marker, rank, part)
    assert parse_store_segment(segment.name) == segment
    assert is_object_name(segment.name)
    assert parse_fold_segment(segment.name) is None


@given(JOBS, MARKERS, st.none() | MARKERS, PARTS)
def test_names_of_folds_and_their_segments_are_parsed_as_they_were_made(
    job: bytes, end: MarkerId, start: MarkerId | None, part: int
) -> None:
    fold = FoldName(job, end, start)
    assert parse_fold_name(fold.name) == fold
    assert parse_fold_segment(fold.segment_name(part)) == (fold, part)
    assert parse_store_segment(fold.segment_name(part)) is None
    assert is_object_name(fold.name)
    assert is_object_name(fold.segment_name(part))


@given(JOBS, MARKERS)
def test_names_of_markers_in_a_store_are_parsed_as_they_were_made(job: bytes, marker: MarkerId) -> None:
    assert parse_manifest_name(manifest_name(job, marker)) == (job, marker)
    assert parse_dropped_name(dropped_name(job, marker)) == (job, marker)
    dense = dense_file_name(job, marker, "__0_0.distcp")
    assert dense == f"{dense_name(job, marker)}/__0_0.distcp"
    assert parse_dense_file(dense) == (job, marker, "__0_0.distcp")
    for name in (manifest_name(job, marker), dropped_name(job, marker), dense):
        assert is_object_name(name)


def test_names_in_a_store_are_those_of_the_format() -> None:
    job, hexed = bytes(range(16)), "000102030405060708090a0b0c0d0e0f"
    fold = FoldName(job, MarkerId(1, 48), MarkerId(1, 32))
    base = FoldName(job, MarkerId(1, 48), None)
    assert StoreSegment(job, MarkerId(1, 7), 0, 0).name == f"segments/{hexed}/g00000001-r00000-m00000007-p000.seg"
    assert manifest_name(job, MarkerId(1, 7)) == f"manifests/{hexed}/g00000001-m00000007.json"
    assert fold.name == f"folds/{hexed}/g00000001-m00000048-from-g00000001-m00000032.json"
    assert base.name == f"folds/{hexed}/g00000001-m00000048-from-root.json"
    assert base.segment_name(2) == f"segments/{hexed}/f-g00000001-m00000048-from-root-p002.seg"
    assert dropped_name(job, MarkerId(1, 3)) == f"dropped/{hexed}/g00000001-m00000003"


@given(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(r"\A(segments|folds|manifests|dropped|dense)/[0-9a-fA-F]{32}/[gmrpf0-9root.js/-]{0,60}\Z"),
        st.from_regex(r"\Amanifests/[0-9a-f]{32}/g\d{7,9}-m\d{7,9}\.json\Z"),
        st.from_regex(r"\Asegments/[0-9a-f]{32}/g\d{7,9}-r\d{4,6}-m\d{7,9}-p\d{2,4}\.seg\Z"),
        st.from_regex(r"\Afolds/[0-9a-f]{32}/g\d{7,9}-m\d{7,9}-from-g\d{7,9}-m\d{7,9}\.json\Z"),
    )
)
def test_a_name_that_is_parsed_is_the_one_that_would_be_made(name: str) -> None:
    if segment := parse_store_segment(name):
        assert segment.name == name
    if fold := parse_fold_name(name):
        assert fold.name == name
    if rows := parse_fold_segment(name):
        assert rows[0].segment_name(rows[1]) == name
    if manifest := parse_manifest_name(name):
        assert manifest_name(*manifest) == name
    if dropped := parse_dropped_name(name):
        assert dropped_name(*dropped) == name
    if dense := parse_dense_file(name):
        assert dense_file_name(*dense) == name


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("/data/store", "file:///data/store"),
        ("file:///data/store/", "file:///data/store"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("memory://x/y", "memory://x/y"),
        ("abfs://container@account.example/x", "abfs://container@account.example/x"),
    ],
)
def test_urls_of_stores_have_one_form(url: str, canonical: str) -> None:
    where = check_store_url(url)
    assert str(where) == canonical == str(check_store_url(canonical))
    assert where.folder == (Path(canonical.removeprefix("file://")) if where.scheme == "file" else None)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://",
        "s3://",
        "s3:///x",
        "s3://bucket//x",
        "s3://bucket/../x",
        "s3://./x",
        "kafka://host:1/job",
        "S3://bucket",
        "a b://x",
        "://x",
        "simplecache::s3://bucket",
        "s3://x::y",
        "s3://bucket/\n",
        "s3://bucket/\x1b[2J",
    ],
)
def test_other_urls_are_no_stores(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_store_url(url)
    assert refused.value.hint
    assert "\x1b" not in str(refused.value)


def test_a_store_url_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="must not contain a password") as refused:
        check_store_url("s3://user:hush@bucket/x")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "kafka://user:S3cret@host:9092/job",
        "kafka://host:9092,user:S3cret@other:9092/job",
        "kafka://user:S3/cret@host:9092/job",
        "kafka://:S3cret@host",
        "s3://user:S3cret@bucket/x",
        "http://user:S3cret@host/x",
    ],
)
def test_a_login_in_a_uri_is_refused_and_never_shown(uri: str) -> None:
    for read in (parse_uri, check_store_url):
        with pytest.raises(ConfigError) as refused:
            read(uri)
        assert "cret" not in str(refused.value)


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=f"has an invalid port {port}") as refused:
        parse_uri(f"kafka://host:9092,other:{port}/job")
    assert refused.value.hint == "use a port from 1 to 65535"


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="has a NUL"):
        parse_uri("file:///data/a\0b")
