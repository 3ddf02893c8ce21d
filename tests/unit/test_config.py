"""Settings are checked as soon as they are given."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.command import call
from tests.parts import open_log
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, settings_of
from torchrec_stream_ckpt.log.api import load_options
from torchrec_stream_ckpt.native.kernel import VARIABLE
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


# Settings from a file, from the environment and from flags, and what prints where they came from.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        'uri = "file:///ckpt/job"\nmarker_every = "none"\nmarker_every_s = 30\nring_bytes = 8388608\nfresh = true\n'
        'store = "s3://bucket/job"\nstore_options = {key = "me", secret = "hidden"}\n'
    )
    return path


def parse(*argv: str) -> argparse.Namespace:
    parser = FlagParser()
    add_flags(parser)
    return parser.parse_args(argv)


def wrong(tmp_path: Path, text: str) -> str:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        StreamConfig.from_file(path)
    assert str(path) in error.value.headline
    return error.value.message


def test_a_file_has_settings_under_their_names(file: Path) -> None:
    assert StreamConfig.from_file(file) == StreamConfig(
        uri="file:///ckpt/job",
        marker_every=None,
        marker_every_s=30,
        ring_bytes=8388608,
        fresh=True,
        store="s3://bucket/job",
        store_options={"key": "me", "secret": "hidden"},
    )


def test_two_tiers_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[stream_ckpt]\nuri = ["file:///a", "file:///b"]\n[model]\nrows = 3\n')
    assert StreamConfig.from_file(path) == StreamConfig(uri=("file:///a", "file:///b"))


def test_an_unknown_setting_names_the_nearest_and_all_mistakes_are_said_at_once(tmp_path: Path) -> None:
    said = wrong(tmp_path, 'uri = "file:///a"\nmarker_evry = 3\nzzz = 1\nhead = 5\nfresh = 1\nring_bytes = 1.5\n')
    assert said.split("; ") == [
        "'marker_evry' is not a setting: did you mean 'marker_every'?",
        "'zzz' is not a setting",
        "head must be text or none, got 5",
        "fresh must be true or false, got 1",
        "ring_bytes must be a whole number of at least 1, got 1.5",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uri = ", "the settings are not TOML"),
        ("marker_every = 5", "uri is not set"),
        (
            'uri = "file:///a"\nmarker_every = true',
            "marker_every must be a whole number of at least 1 or none, got True",
        ),
        (
            'uri = "file:///a"\ndrain_every = "none"',
            "drain_every must be a whole number of at least 1 or 'auto', got 'none'",
        ),
        ("uri = [1]", "uri must be text or a list of strings"),
        ('uri = "file:///a"\nstore = 2024-01-01', "store must be text"),
        ('uri = "file:///a"\nring_bytes = 0', "ring_bytes must be a whole number of at least 1, got 0"),
        (
            'uri = "file:///a"\nkafka_options = ["hidden"]',
            "kafka_options must be text or a table or none, got an object of type",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in (message := wrong(tmp_path, text))
    assert "hidden" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings: No such file .*nothing\.toml"):
        StreamConfig.from_file(tmp_path / "nothing.toml")


def test_the_environment_counts_more_than_the_file_and_arguments_most(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_CKPT_MARKER_EVERY", "7")
    monkeypatch.setenv("STREAM_CKPT_DRAIN_EVERY", "auto")
    monkeypatch.setenv("STREAM_CKPT_FRESH", "false")
    monkeypatch.setenv("STREAM_CKPT_HEAD", "none")
    monkeypatch.setenv("STREAM_CKPT_STORE", "")
    monkeypatch.setenv("STREAM_CKPT_COMMIT_TIMEOUT_S", "2.5")
    found = StreamConfig.from_file(file, commit_timeout_s=9.0)
    assert (found.marker_every, found.drain_every, found.fresh, found.head) == (7, "auto", False, None)
    assert (found.store, found.commit_timeout_s) == ("s3://bucket/job", 9.0)
    monkeypatch.setenv("STREAM_CKPT_CONFIG", str(file))
    assert StreamConfig.from_file(commit_timeout_s=9.0) == found
    monkeypatch.setenv("STREAM_CKPT_URI", "file:///near file:///far")
    assert StreamConfig.from_file().uris == ("file:///near", "file:///far")
    assert StreamConfig(uri="file:///x").marker_every == 100  # code alone says


def test_a_wrong_variable_is_named_and_one_that_is_nearly_right_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STREAM_CKPT_MARKER_EVRY", "7")
    monkeypatch.setenv("STREAM_CKPT_SERVICE_HOST", "10.0.0.1")  # Kubernetes sets this
    StreamConfig.from_file(uri="file:///x")
    assert [record.getMessage() for record in caplog.records] == [
        "the environment variable STREAM_CKPT_MARKER_EVRY is not a setting: did you mean STREAM_CKPT_MARKER_EVERY?"
    ]
    monkeypatch.setenv("STREAM_CKPT_FRESH", "maybe")
    with pytest.raises(ConfigError, match="STREAM_CKPT_FRESH must be true or false, got 'maybe'"):
        StreamConfig.from_file(uri="file:///x")


def test_every_setting_can_be_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"uri": "file:///a", "marker_every": None, "drain_every": "auto", "fresh": True}
    values |= {"on_stream_failure": "raise", "on_column_resplit": "merge", "metrics_host": "::1", "verify_head": False}
    values |= {"store": "file:///s", "head": "/h", "tensorboard": "t", "max_overhead": 0.5, "outer_every": 1}
    values |= {"store_options": "o", "kafka_options": "k", "commit_key_file": "c", "max_fallback": 0}
    for field in fields(StreamConfig):
        value = values.setdefault(field.name, field.default if isinstance(field.default, str) else 3)
        if field.name in ("marker_every_s", "marker_every_event_s", "on_signal"):
            values[field.name] = field.default  # not with max_overhead; or of another kind
            continue
        monkeypatch.setenv(f"STREAM_CKPT_{field.name.upper()}", "none" if value is None else str(value).lower())
    assert StreamConfig.from_file() == StreamConfig(**values)


def test_flags_count_more_than_environment_and_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_CKPT_MARKER_EVERY_S", "20")
    monkeypatch.setenv("STREAM_CKPT_METRICS_PORT", "9400")
    monkeypatch.setenv("STREAM_CKPT_RESTORE", "2:17")
    args = parse("--stream_config", str(file), "--metrics_port", "9500")
    config = config_from(args)
    assert config is not None
    assert (config.uri, config.marker_every, config.marker_every_s) == ("file:///ckpt/job", None, 20.0)
    assert (config.metrics_port, config.ring_bytes, config.fresh) == (9500, 8388608, True)
    assert (args.restore, args.marker_every, args.drain_every) == ("2:17", None, 1)
    assert args.stream_ckpt == ["file:///ckpt/job"]
    origins = {name: each.origin for name, each in settings_of(parse("--metrics_port", "9500")).items()}
    assert (origins["metrics_port"], origins["uri"]) == ("flag", "default")
    assert origins["marker_every_s"] == "environment STREAM_CKPT_MARKER_EVERY_S"


def test_without_a_uri_anywhere_nothing_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_CKPT_MARKER_EVERY", "20")
    args = parse()
    assert config_from(args) is None
    assert args.marker_every == 100
    monkeypatch.setenv("STREAM_CKPT_URI", "file:///x")
    config = config_from(parse())
    assert config is not None
    assert (config.uri, config.marker_every) == ("file:///x", 20)


def test_a_file_without_a_uri_and_a_wrong_variable_of_a_flag_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text("marker_every = 3\n")
    with pytest.raises(ConfigError, match="--stream_config needs --stream_ckpt URI"):
        config_from(parse("--stream_config", str(tmp_path / "job.toml")))
    monkeypatch.setenv("STREAM_CKPT_RESTORE", "newest")
    with pytest.raises(ConfigError, match="the environment variable STREAM_CKPT_RESTORE: 'newest' is not latest"):
        config_from(parse("--stream_ckpt", "file:///x"))


def config(*arguments: str) -> Any:
    return call("config", *arguments, columns=150)


def test_config_says_what_holds_and_where_it_came_from(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_CKPT_DRAIN_EVERY", "auto")
    monkeypatch.setenv("STREAM_CKPT_LIST_NEWEST", "5")
    monkeypatch.setenv("STREAM_CKPT_BROKER_START_PORT", "9092")
    monkeypatch.setenv("STREAM_CKPT_STANDBY", "30")
    monkeypatch.setenv("STREAM_CKPT_WIDTH", "150")
    monkeypatch.setenv("STREAM_CKPT_OTHER", "x")
    monkeypatch.setenv(VARIABLE, "off")
    done = config("--file", str(file), "--metrics_port", "9400", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert set(said["settings"]) == {field.name for field in fields(StreamConfig)}
    assert said["settings"]["uri"] == {"value": "file:///ckpt/job", "from": f"file {file}"}
    assert said["settings"]["drain_every"] == {"value": "auto", "from": "environment STREAM_CKPT_DRAIN_EVERY"}
    assert said["settings"]["metrics_port"] == {"value": 9400, "from": "flag"}
    assert said["settings"]["proof_bytes"]["from"] == "default"
    assert said["variables"] == {
        "STREAM_CKPT_BROKER_START_PORT": "stream-ckpt broker start --port",
        VARIABLE: "the native kernel, in every program",
        "STREAM_CKPT_LIST_NEWEST": "stream-ckpt list --newest",
        "STREAM_CKPT_OTHER": "nothing reads it",
        "STREAM_CKPT_STANDBY": "--standby of training scripts",
        "STREAM_CKPT_WIDTH": "--width of each verb",
    }
    assert "hidden" not in done.output
    table = config("--file", str(file)).output
    assert "8388608 (8.4 MB)" in table
    assert "secret=***" in table


def test_config_refuses_what_a_script_would(tmp_path: Path, file: Path) -> None:
    assert isinstance(config("--file", str(tmp_path / "nothing.toml")).exception, ConfigError)
    assert isinstance(config("--stream_ckpt", "kafka://h:1/j").exception, ConfigError)
    done = config("--file", str(file), "--marker_evry", "3")
    assert (done.exit_code, "unrecognized arguments: --marker_evry" in done.stderr) == (2, True)
    assert config().exit_code == 0
