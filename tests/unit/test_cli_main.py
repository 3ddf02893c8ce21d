"""The command line as a whole: its verbs, what they share, and how fast it starts."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.parts import Broker, app
from torchrec_stream_ckpt import __version__
from torchrec_stream_ckpt.cli.main import ALSO_CALLED, STATUSES, VERBS, mistake_in, says
from torchrec_stream_ckpt.cli.options import Access, JobOptions, Json, as_command, is_verbose
from torchrec_stream_ckpt.cli.variables import give_variables
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError

runner = CliRunner()


def run(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_the_version_is_the_packages() -> None:
    assert run("--version").output == f"stream-ckpt {__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "torchrec_stream_ckpt", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout == f"stream-ckpt {__version__}\n"


def test_warnings_of_torch_about_torchrec_are_not_printed() -> None:
    program = """
import sys, warnings
from torchrec_stream_ckpt.cli.main import main
sys.argv = ["stream-ckpt", "--version"]
try:
    main()
except SystemExit:
    warnings.warn_explicit("deprecated", FutureWarning, "_script.py", 1, module="torch.jit._script")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert done.stderr == ""


def test_a_broker_does_not_start_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder cannot be written: File exists"):
        Broker(tmp_path / "file").start()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_nobody_takes_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "torchrec_stream_ckpt", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (1, "Error: cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("arguments", [["--version"], ["plan", "--help"], ["broker", "--help"]])
def test_a_reader_that_has_stopped_is_no_error(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchrec_stream_ckpt", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=500, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_every_verb_is_there_and_says_what_it_does() -> None:
    said = run("--help").output
    for verb, place in VERBS.items():
        module, _, name = place.partition(":")
        assert f" {verb} " in said
        assert hasattr(import_module(f"torchrec_stream_ckpt.cli.{module}"), name)
        assert "--help" in run(verb, "--help").output


def test_a_verb_imports_what_it_needs_and_nothing_of_the_others() -> None:
    program = (
        "import json, sys\n"
        "from torchrec_stream_ckpt.cli.main import app, VERBS\n"
        "import typer\n"
        "command = typer.main.get_command(app)\n"
        "before = sorted(sys.modules)\n"
        "command.commands['list']\n"
        "print(json.dumps([before, sorted(sys.modules)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    before, after = (set(names) for names in json.loads(done.stdout))
    package = "torchrec_stream_ckpt"
    assert "numpy" not in before
    assert not [name for name in before if name.startswith((f"{package}.log", f"{package}.store"))]
    others = {f"{package}.cli.{place.partition(':')[0]}" for place in VERBS.values()} - {f"{package}.cli.list_"}
    assert not others & after
    assert not [name for name in after if name.startswith((f"{package}.materialize", f"{package}.interchange"))]


def test_what_a_verb_is_called_elsewhere_names_the_verb() -> None:
    assert set(ALSO_CALLED.values()) <= set(VERBS)
    assert not set(ALSO_CALLED) & set(VERBS)
    done = run("status", "file:///nowhere")
    assert done.exit_code == 2
    assert "No such command 'status'. Use 'watch'." in done.output


def test_a_verb_and_an_option_that_are_misspelt_name_those_that_are_near() -> None:
    assert "Did you mean 'verify'" in run("verfy", "file:///nowhere").output
    assert "--store" in run("list", "file:///nowhere", "--stor", "x").output


@pytest.mark.parametrize(
    ("arguments", "said", "tried"),
    [
        (("list", "file:///x", "--newest", "many"), "Invalid value for '--newest'", "stream-ckpt list --help"),
        (("list",), "Missing argument 'URI'", "stream-ckpt list --help"),
        (("broker", "start", "--nodes"), "No such option: --nodes", "stream-ckpt broker start --help"),
        (("--sore",), "No such option: --sore", "stream-ckpt --help"),
        (
            ("gc", "--engine", "local:2"),
            "No such option: --engine",
            "gc deletes in its own process: leave this option out",
        ),
        (
            ("scrub", "--engine", "local:2"),
            "No such option: --engine",
            "scrub reads on threads of its own process: leave this option out",
        ),
    ],
)
def test_a_wrong_call_is_one_line_and_what_to_try(arguments: tuple[str, ...], said: str, tried: str) -> None:
    done = runner.invoke(app, arguments, prog_name="stream-ckpt")
    first, second = done.stderr.splitlines()
    assert (done.exit_code, done.stdout) == (2, "")
    assert first.startswith(f"Error: {said}")
    assert second == f"Try: {tried}"


@pytest.mark.parametrize("arguments", [(), ("broker",)])
def test_no_arguments_show_the_help(arguments: tuple[str, ...]) -> None:
    assert "Usage:" in runner.invoke(app, arguments).output


def test_the_list_of_verbs_says_what_each_says_and_imports_none() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {verb: (commands[verb].help or "").split("\n\n")[0] for verb in VERBS} == {
        verb: says(verb) for verb in VERBS
    }
    program = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from torchrec_stream_ckpt.cli.main import app\n"
        "print(CliRunner().invoke(app, ['--help']).output)\n"
        "print([name for name in sys.modules if name in ('numpy', 'torchrec_stream_ckpt.cli.common')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert " unpin " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_help_turns_a_word_between_colons_into_a_picture() -> None:
    for verb in VERBS:
        said = run(verb, "--help").output
        assert not [each for each in said if ord(each) > 0x2600], verb
    assert "best:auc:max" in run("show", "--help").output


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "broker"])
def test_the_help_cuts_no_option_at_80_columns(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    said = runner.invoke(app, [verb, "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, said.splitlines())) <= 80
    names = [name for each in command.params for name in (*each.opts, *each.secondary_opts) if name.startswith("--")]
    assert [name for name in names if name not in said] == []


def test_the_help_says_what_statuses_mean() -> None:
    said = " ".join(run("--help").output.split())
    assert all(f"{number}: {meaning}" in said for number, meaning in STATUSES.items())


def test_an_option_that_is_not_given_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []

    def verb(options: JobOptions, count: int = 3, json: Json = False) -> None:
        """Do it."""
        got.append((options.store, count, json))

    command = give_variables(typer.main.get_command(made(verb)), "some-verb")
    monkeypatch.setenv("STREAM_CKPT_SOME_VERB_COUNT", "7")
    monkeypatch.setenv("STREAM_CKPT_SOME_VERB_JSON", "true")
    monkeypatch.setenv("STREAM_CKPT_STORE", "shared")
    command.main(["URI"], standalone_mode=False)
    monkeypatch.setenv("STREAM_CKPT_SOME_VERB_STORE", "own")
    command.main(["URI"], standalone_mode=False)
    command.main(["URI", "--count", "1", "--store", "given"], standalone_mode=False)
    assert got == [("shared", 7, True), ("own", 7, True), ("given", 1, True)]


def test_every_option_of_every_verb_has_a_variable_of_its_own() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found: list[str] = []
    for verb in VERBS:
        inner = getattr(commands[verb], "commands", {"": commands[verb]})
        for name, command in inner.items():
            options = [each for each in command.params if each.opts[0].startswith("-") and each.name != "help"]
            assert all(each.envvar[0].startswith(f"STREAM_CKPT_{verb.upper().replace('-', '_')}_") for each in options)
            assert not any(each.show_envvar for each in options), (verb, name)
            found += [each.envvar[0] for each in options]
    assert len(found) == len(set(found))
    assert {"STREAM_CKPT_LIST_NEWEST", "STREAM_CKPT_VERIFY_ALL", "STREAM_CKPT_BROKER_START_PORT"} <= set(found)


def test_a_wrong_value_from_the_environment_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAM_CKPT_LIST_NEWEST", "many")
    done = run("list", "file:///x")
    assert done.exit_code == 2
    assert "(from the environment variable STREAM_CKPT_LIST_NEWEST)" in done.stderr
    assert "environment" not in run("list", "file:///x", "--newest", "many").stderr
    assert mistake_in(["list", "file:///x"]) is None


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in run("--help").output
    assert "--install-completion" not in run("list", "--help").output


def made(verb: Any) -> typer.Typer:
    one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    one.command()(as_command(verb))
    return one


def test_an_option_group_becomes_options_and_comes_back_as_a_value() -> None:
    got: list[Any] = []

    def verb(options: JobOptions, marker: str, count: int = 3, json: Json = False) -> None:
        """Do it."""
        got.append((options, marker, count, json))

    done = runner.invoke(made(verb), ["URI", "1:2", "--count", "5", "--store", "S", "--commit-key-file", "K", "--json"])
    assert done.exit_code == 0, done.output
    expected = JobOptions(uri="URI", store="S", commit_key_file=Path("K"))
    assert got == [(expected, "1:2", 5, True)]
    assert "Do it." in runner.invoke(made(verb), ["--help"]).output


def test_verbose_sends_what_the_library_logs_to_stderr_for_this_verb_alone() -> None:
    ours = logging.getLogger("torchrec_stream_ckpt")
    before = (ours.level, list(ours.handlers))

    def verb(access: Access) -> None:
        ours.info("one thing %s", is_verbose())

    assert runner.invoke(made(verb), []).output == ""
    said = runner.invoke(made(verb), ["-v"])
    assert "INFO torchrec_stream_ckpt: one thing True" in said.stderr
    assert (ours.level, list(ours.handlers)) == before
    assert not is_verbose()


def test_verbose_before_the_verb_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def opened(*_: object, **__: object) -> None:
        seen.append(is_verbose())
        raise StreamCkptError("enough")

    monkeypatch.setattr("torchrec_stream_ckpt.cli.common.open_job", opened)
    for arguments in (["-v", "list"], ["list", "-v"], ["list"]):
        run(*arguments, f"file://{tmp_path}")
    assert seen == [True, True, False]
