"""Settings are checked as soon as they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parts import open_log
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.log.api import load_options
from torchrec_stream_ckpt.util.config import Source, StreamConfig
from torchrec_stream_ckpt.util.options import read_options

FILE = "file:///data/log"
KAFKA = "kafka://host:9092/job"


def test_a_file_log_needs_nothing_else() -> None:
    config = StreamConfig(uri=FILE)
    assert config.store_url == "file:///data/log"
    assert config.on_column_resplit == "refuse"


def test_a_store_may_lie_elsewhere() -> None:
    assert StreamConfig(uri=FILE, store="file:///data/store").store_url == "file:///data/store"
    assert StreamConfig(uri=KAFKA, store="/data/store").store_url == "file:///data/store"


def test_kafka_needs_a_store() -> None:
    with pytest.raises(ConfigError, match="store is required with Kafka"):
        StreamConfig(uri=KAFKA)


def test_markers_may_be_asked_for_by_hand_only() -> None:
    config = StreamConfig(uri=FILE, marker_every=None)
    assert (config.marker_every, config.marker_every_s) == (None, None)


@pytest.mark.parametrize("value", [-1, 1.5, "4MiB", True, None])
def test_a_proof_of_no_number_of_bytes_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="proof_bytes must be a whole number of at least 0, got") as caught:
        StreamConfig(uri="file:///x", proof_bytes=value)  # type: ignore[arg-type]
    assert caught.value.hint is not None


@pytest.mark.parametrize("name", ["drain_every", "marker_every", "ring_bytes", "sweep_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "10", True])
def test_counts_must_be_positive_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least 1( or 'auto'| or none)?, got"):
        StreamConfig(uri=FILE, **{name: value})


@pytest.mark.parametrize("name", ["marker_every_s", "commit_timeout_s"])
@pytest.mark.parametrize("value", [0, -0.5, float("nan")])
def test_times_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number above 0( or none)?, got"):
        StreamConfig(uri=FILE, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"uri": "data/log"}, "is not a known kind of log"),
        ({"uri": FILE, "store": "kafka://host:1/job"}, "is not a store"),
        ({"uri": FILE, "store": "s3://user:secret@bucket"}, "must not contain a password"),
        (
            {"uri": FILE, "drain_every": "often"},
            "drain_every must be a whole number of at least 1 or 'auto', got 'often'",
        ),
        ({"uri": FILE, "max_overhead": 0.0}, "max_overhead must be a number above 0 and at most 1 or none, got 0.0"),
        (
            {"uri": FILE, "max_overhead": float("nan")},
            "max_overhead must be a number above 0 and at most 1 or none, got nan",
        ),
        (
            {"uri": FILE, "max_overhead": 0.01, "marker_every": 7},
            "max_overhead cannot be combined with a marker interval",
        ),
        (
            {"uri": FILE, "max_overhead": 0.01, "marker_every_s": 7.0},
            "max_overhead cannot be combined with a marker interval",
        ),
        (
            {"uri": FILE, "marker_budget_bytes": -1},
            "marker_budget_bytes must be a whole number of at least 0, got -1",
        ),
        ({"uri": FILE, "head": ""}, "head must be text or none, got ''"),
        ({"uri": FILE, "on_column_resplit": "drop"}, "must be 'refuse' or 'merge', got 'drop'"),
    ],
)
def test_bad_settings_are_named(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamConfig(**setting)


def test_settings_are_given_by_name_only() -> None:
    with pytest.raises(TypeError):
        StreamConfig(FILE)  # type: ignore[misc]


def test_config_errors_are_value_errors() -> None:
    with pytest.raises(ValueError, match="uri must be text or a list of strings, got ''"):
        StreamConfig(uri="")


# Options of Kafka clients, read before any client is made.


def test_options_come_from_a_mapping_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text("# comment\n\nsecurity.protocol = SASL_SSL\n  sasl.password=a=b \n")
    assert load_options(path) == load_options(str(path)) == {"security.protocol": "SASL_SSL", "sasl.password": "a=b"}
    assert load_options({"linger.ms": 5}) == {"linger.ms": "5"}  # type: ignore[dict-item]
    assert load_options(None) == {}


@pytest.mark.parametrize("line", ["security.protocol", "=value", "  = x"])
def test_lines_that_are_no_options_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(f"a=b\n{line}\n")
    with pytest.raises(ConfigError, match="client options must be key=value lines") as refused:
        load_options(path)
    assert refused.value.where == {"path": path, "line": 2}


def test_a_missing_options_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read client options: No such file") as refused:
        load_options(tmp_path / "gone")
    assert refused.value.where == {"path": tmp_path / "gone"}


def test_options_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "options"
    path.write_bytes(b"\xff\xfe\x00key=value")
    with pytest.raises(ConfigError, match="store options must be text") as refused:
        read_options(path, "store")
    assert refused.value.where["path"] == path


def test_a_file_log_takes_no_client_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="client options are for Kafka"):
        open_log(f"file://{tmp_path}", {"a": "b"})


def test_opening_a_log_touches_nothing(tmp_path: Path) -> None:
    open_log(f"file://{tmp_path}/log").close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "value"), [("max_fallback", -1), ("max_fallback", True), ("max_fallback", 1.5), ("fresh", "yes")]
)
def test_nonsense_about_what_to_restore_is_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        StreamConfig(uri="file:///log", **{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"commit_timeout_s": "5"},
        {"marker_every_s": "x"},
        {"marker_budget_bytes": "1"},
        {"max_overhead": "0.1"},
        {"commit_timeout_s": True},
        {"uri": 5},
        {"uri": None},
    ],
)
def test_a_value_of_another_type_is_named(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} must be") as refused:
        StreamConfig(**{"uri": "file:///x", **wrong})  # type: ignore[arg-type]
    assert refused.value.hint


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"on_signal": "stop"}, "on_signal must be 'mark' or 'none', got 'stop'"),
        ({"on_signal": True}, "on_signal must be 'mark' or 'none', got True"),
        ({"signal_s": 0}, "signal_s must be a number above 0, got 0"),
        ({"signal_s": "20"}, "signal_s must be a number above 0, got '20'"),
    ],
)
def test_signals_are_answered_by_a_marker_or_not_at_all(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StreamConfig(uri="file://x", **given)
    assert StreamConfig(uri="file://x").on_signal is None


def test_what_stands_behind_the_at_of_a_source_is_a_marker_or_a_folder_of_that_name(tmp_path: Path) -> None:
    assert Source.of("file:///old@latest") == Source("file:///old")
    assert Source.of(("file:///a@latest", "file:///b@latest")) == Source(("file:///a", "file:///b"))
    for end in ("", "a b", "1:1 ", "best:auc", "newest"):
        with pytest.raises(ConfigError, match=f"'{end}' is not a marker"):
            Source.of(f"file://{tmp_path}/old@{end}")
    (tmp_path / "old@abc").mkdir()
    assert Source.of(f"file://{tmp_path}/old@abc") == Source(f"file://{tmp_path}/old@abc")


def test_a_source_takes_the_options_of_the_job_that_it_can_use() -> None:
    own = StreamConfig(uri=KAFKA, store="s3://b/p", kafka_options={"a": "b"}, store_options={"c": "d"})
    found = Source("file:///old").settings(own)
    assert (found.kafka_options, found.store_options) == (None, None)
    found = Source("kafka://other:9092/old", store="s3://b/q").settings(own)
    assert (found.kafka_options, found.store_options) == ({"a": "b"}, {"c": "d"})
    for bucket in ("s3://b/old", ("file:///near", "gs://b/old")):  # log and store
        found = Source(bucket).settings(own)
        assert (found.kafka_options, found.store_options) == (None, {"c": "d"})
    assert Source("s3://b/old", store_options={"e": "f"}).settings(own).store_options == {"e": "f"}


def test_a_source_with_kafka_names_its_store() -> None:
    with pytest.raises(ConfigError, match="store is required with Kafka"):
        Source(KAFKA)


@pytest.mark.parametrize("given", [None, 3, Path("/old"), (Path("/old"),)])
def test_a_source_that_is_no_text_is_named(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"the source of a warm start must name one log, got .*(None|3|old)"):
        Source.of(given)
