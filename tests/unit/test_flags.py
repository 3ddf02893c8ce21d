"""The flags of a training script: what they become, and that a script without them pays nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_stream_ckpt import Changes, Restored, Source, StreamConfig, Takeover
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.flags import add_flags, config_from, restore_from


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(argv)


def test_without_stream_ckpt_there_is_no_config() -> None:
    args = parse()
    assert config_from(args) is None
    assert (args.restore, args.drain_every, args.marker_every, args.paranoid) == ("latest", 1, 100, False)


def test_every_setting_reaches_the_config(tmp_path: Path) -> None:
    for name in ("kafka", "store", "key"):
        (tmp_path / name).write_text("a=b\n")
    flags = {
        "store": "s3://bucket/x",
        "store_options": str(tmp_path / "store"),
        "drain_every": "2",
        "marker_every": "3",
        "marker_every_s": "4.5",
        "proof_bytes": "0",
        "kafka_options": str(tmp_path / "kafka"),
        "commit_key_file": str(tmp_path / "key"),
        "metrics_port": "9400",
        "metrics_host": "0.0.0.0",
        "metrics_run": "monday",
        "tensorboard": "events",
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert config_from(parse("--stream_ckpt", "kafka://h:1/j", *argv)) == StreamConfig(
        uri="kafka://h:1/j",
        store="s3://bucket/x",
        store_options=str(tmp_path / "store"),
        drain_every=2,
        marker_every=3,
        marker_every_s=4.5,
        proof_bytes=0,
        kafka_options=str(tmp_path / "kafka"),
        commit_key_file=str(tmp_path / "key"),
        metrics_port=9400,
        metrics_host="0.0.0.0",
        metrics_run="monday",
        tensorboard="events",
    )


def test_the_pace_may_be_left_to_the_library() -> None:
    found = config_from(parse("--stream_ckpt", "file://x", "--drain_every", "auto", "--max_overhead", "0.01"))
    assert found == StreamConfig(uri="file://x", drain_every="auto", max_overhead=0.01)


def test_a_flag_that_cannot_say_none_names_the_variable_that_can(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        parse("--stream_ckpt", "file://x", "--marker_every", "none")
    assert (
        "--marker_every: cannot be 'none': set it in a file, or by STREAM_CKPT_MARKER_EVERY" in capsys.readouterr().err
    )
    monkeypatch.setenv("STREAM_CKPT_MARKER_EVERY", "none")
    assert config_from(parse("--stream_ckpt", "file://x")) == StreamConfig(uri="file://x", marker_every=None)


TWICE = ["--stream_ckpt", "file://x", "--stream_ckpt", "kafka://h:1/j"]


def test_stream_ckpt_twice_is_two_tiers() -> None:
    found = config_from(parse(*TWICE, "--outer_every", "4", "--store", "s3://b/p"))
    assert found == StreamConfig(uri=("file://x", "kafka://h:1/j"), outer_every=4, store="s3://b/p")


def test_flags_that_are_not_given_are_those_of_the_config() -> None:
    assert config_from(parse("--stream_ckpt", "file://x")) == StreamConfig(uri="file://x")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--commit_key_file", "x"], "--commit_key_file needs --stream_ckpt URI"),
        (["--max_overhead", "0.01"], "--max_overhead needs --stream_ckpt URI"),
        (
            ["--stream_ckpt", "file://x", "--max_overhead", "1", "--marker_every", "5"],
            "cannot be combined with a marker interval",
        ),
        (["--restore", "none"], "--restore needs --stream_ckpt URI, file://DIR or kafka://BROKERS/JOB"),
        (["--stream_ckpt", "file://"], "does not name a directory"),
        (["--stream_ckpt", "ckpt"], "'ckpt' is not a known kind of log"),
        (["--stream_ckpt", "kafka://host/j", "--store", "x"], "does not name a broker as HOST:PORT"),
        (["--stream_ckpt", "file://x", "--commit_key_file", "no.key"], "--commit_key_file no.key: no such file"),
        (["--stream_ckpt", "file://x", "--store", "s3://a:b@c/d"], "must not contain a password"),
        (
            ["--stream_ckpt", "file://x", "--outer_every", "2"],
            "outer_every requires two tiers, but uri names only one log",
        ),
        ([*TWICE, "--stream_ckpt", "file://z"], "uri must name one log or two tiers, got 3"),
        (
            ["--stream_ckpt", "kafka://h:1/a", "--stream_ckpt", "kafka://h:1/b", "--store", "x"],
            "the nearest tier must be a folder, got kafka://h:1/a",
        ),
        (["--stream_ckpt", "file://x", "--stream_ckpt", "file://x"], "the two tiers must differ, but both are .*/x"),
        (TWICE, "store is required with Kafka"),
    ],
)
def test_what_does_not_go_together_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(parse(*argv))


class Recorder:
    """Stands where a checkpointer does, and keeps what it was asked for."""

    def __init__(self, found: Restored | None) -> None:
        self.found = found
        self.asked: list[str | None] = []

    def restore(
        self,
        marker: str | None = None,
        *,
        changes: Changes | None = None,
        once: bool = False,
        accept_unproved: bool = False,
    ) -> Restored | None:
        assert once
        self.asked.append(marker)
        self.accepted, self.changes = accept_unproved, changes
        return self.found


@pytest.mark.parametrize(("flag", "asked"), [("latest", [None]), ("none", []), ("2:17", ["2:17"])])
def test_restore_asks_for_what_the_flag_says(flag: str, asked: list[str | None]) -> None:
    found = Restored(2, 17, 170, 2, 5, (), "log")
    checkpointer = Recorder(found)
    assert restore_from(parse("--restore", flag), checkpointer) == (found if asked else None)
    assert checkpointer.asked == asked


def test_unproved_rows_are_accepted_only_if_a_flag_says_so() -> None:
    for argv, accepted in (((), False), (("--accept_unproved",), True)):
        args, checkpointer = parse("--stream_ckpt", "file://x", *argv), Recorder(Restored(1, 1, 1, 1, 1))
        config_from(args)
        restore_from(args, checkpointer)
        assert checkpointer.accepted is accepted
    with pytest.raises(ConfigError, match="--restore none"):
        config_from(parse("--stream_ckpt", "file://x", "--accept_unproved", "--restore", "none"))


def test_declared_changes_reach_the_restore(tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text('added = ["ebc.t_city"]\n')
    flag = ("--changes", str(tmp_path / "changes.toml"))
    for argv, asked in (((), None), (("--restore", "1:3"), "1:3")):
        args, checkpointer = parse("--stream_ckpt", "file://x", *flag, *argv), Recorder(Restored(1, 3, 1, 1, 1))
        config_from(args)
        restore_from(args, checkpointer)
        assert checkpointer.asked == [asked]
        assert checkpointer.changes == Changes(added=("ebc.t_city",))


def test_a_warm_start_reaches_the_checkpointer_and_its_options_do_not_go_with_others() -> None:
    asked: list[object] = []

    class Begins:
        def warm_start(self, source: Source, **more: object) -> Restored:
            asked.append(source)
            return Restored(1, 3, 1, 1, 1, origin=source.name)

    mine = ("--stream_ckpt", "file://x", "--warm_start")
    for argv, source in (
        (("file://a@b/c",), Source("file://a@b/c")),
        (("file://a@b/c@1:3", "--warm_start_store", "s3://b/p"), Source("file://a@b/c", "1:3", "s3://b/p")),
        (("kafka://h:1/j@2:17", "--warm_start_store", "x"), Source("kafka://h:1/j", "2:17", "x")),
        (("file://a", "--warm_start", "file://b@1:3"), Source(("file://a", "file://b"), "1:3")),
    ):
        args = parse(*mine, *argv)
        config_from(args)
        assert args.source == source
        assert restore_from(args, Begins()) is not None  # type: ignore[arg-type]
        assert asked.pop() == source
    for argv, message in (
        (("--warm_start", "file://a"), "--warm_start needs --stream_ckpt"),
        (("--stream_ckpt", "file://x", "--warm_start_store", "y"), "--warm_start_store needs --warm_start URI"),
        ((*mine, "a"), "'a' is not a known kind of log"),
        ((*mine, "kafka://h:1/j"), "store is required with Kafka"),
        ((*mine, "kafka://h/j", "--warm_start_store", "y"), "does not name a broker as HOST:PORT"),
        ((*mine, "file://a@1:2", "--warm_start", "file://b@1:3"), "must be one marker, got 1:2 and 1:3"),
        ((*mine, "kafka://h:1/j", "--warm_start", "file://b"), "the nearest tier must be a folder"),
        ((*mine, "file://a", "--restore", "latest"), "omit --restore"),
        ((*mine, "file://a", "--standby", "5"), "omit --warm_start"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from(parse(*argv))


def test_changes_that_cannot_be_made_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "changes.toml"
    file.write_text("rowz = 3\n")
    for path, message in ((file, "rowz"), (tmp_path / "none.toml", "cannot be read: No such file")):
        with pytest.raises(SystemExit):
            parse("--stream_ckpt", "file://x", "--changes", str(path))
        said = capsys.readouterr().err
        assert message in said
        assert str(path) in said
    file.write_text('dropped = ["ebc.t"]\n')
    flag = ("--changes", str(file))
    for argv, message in (
        (flag, "--changes needs --stream_ckpt"),
        (("--stream_ckpt", "file://x", *flag, "--restore", "none"), "omit them with --restore none"),
        (("--stream_ckpt", "file://x", *flag, "--standby", "5"), "--standby needs the trainer's model"),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from(parse(*argv))


def test_a_first_start_says_that_it_restores_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse("--stream_ckpt", "file://x")
    config_from(args)
    with caplog.at_level("INFO"):
        assert restore_from(args, Recorder(None)) is None
    assert caplog.messages == ["no committed marker in file://x: starting afresh"]
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level("INFO"):
        assert restore_from(args, Recorder(None)) is None
    assert len(caplog.messages) == 1  # rank 0 says it for all


def test_the_flags_alone_load_nothing_heavy() -> None:
    program = "import sys, torchrec_stream_ckpt.flags; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(done.stdout.split())
    assert "torchrec_stream_ckpt.flags" in loaded
    assert loaded & {"torch", "torchrec", "confluent_kafka", "fsspec", "numpy"} == set()


class Spare:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: object = None

    def restore(self, marker: str | None = None, **_: object) -> Restored | None:
        self.asked = marker
        return None

    def standby(self, takeover: Takeover | None = None, *, accept_unproved: bool = False) -> Restored | None:
        self.asked = takeover
        return None


def test_a_spare_stands_by_instead_of_restoring() -> None:
    args, spare = parse("--stream_ckpt", "file://x", "--standby", "7.5"), Spare()
    config_from(args)
    assert restore_from(args, spare) is None
    assert spare.asked == Takeover(after_s=7.5)


def test_a_spare_takes_no_other_marker_and_needs_a_stream() -> None:
    with pytest.raises(ConfigError, match="omit --restore"):
        config_from(parse("--stream_ckpt", "file://x", "--standby", "7.5", "--restore", "1:2"))
    with pytest.raises(ConfigError, match="--standby needs --stream_ckpt"):
        config_from(parse("--standby", "7.5"))


def test_a_spare_that_would_never_take_over_is_refused() -> None:
    with pytest.raises(ConfigError, match="a spare requires after_s or trigger"):
        Takeover(after_s=None)
    with pytest.raises(ConfigError, match="after_s must be a number above 0 or none"):
        Takeover(after_s=0.0)


def test_a_script_that_looks_at_should_stop_has_signals_on_unless_flag_or_environment_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on(*argv: str) -> object:
        config = config_from(parse("--stream_ckpt", "file://x", *argv), on_signal="mark")
        assert config is not None
        return config.on_signal, config.signal_s

    plain = config_from(parse("--stream_ckpt", "file://x"))
    assert plain is not None
    assert plain.on_signal is None
    assert on() == ("mark", 20.0)
    assert on("--on_signal", "none", "--signal_s", "7") == ("none", 7.0)
    monkeypatch.setenv("STREAM_CKPT_ON_SIGNAL", "none")
    assert on() == ("none", 20.0)
    with pytest.raises(SystemExit):
        parse("--stream_ckpt", "file://x", "--on_signal", "stop")
