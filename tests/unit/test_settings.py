"""Settings from a file, from the environment and from flags, and what prints where they came from."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.parts import app
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, settings_of
from torchrec_stream_ckpt.native.kernel import VARIABLE


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
    return CliRunner().invoke(app, ["config", *arguments], env={"COLUMNS": "150"})


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
