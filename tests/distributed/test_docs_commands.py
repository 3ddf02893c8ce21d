"""Every command of the documentation runs as it stands, or is named here with the reason why not.

Commands are the lines of code blocks. What a page writes in capitals (URI, G:M) is put in; what follows a job for ever
gets ``--once``. ``torchrun`` is played by forked ranks, which find the same in their environment, on smaller tables.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import Result

from tests.command import call
from tests.forks import ROOT, Torchrun
from tests.parts import FileLog
from torchrec_stream_ckpt.inner import Control

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\S*/)?(?:stream-ckpt|torchrun|python[\d.]*|torchx|pip|uv|make|kafka-\S+)(?: |$)"
)
NOT_RUN = {
    r"^make\b": "sets up, tests or measures from a shell; .ci/run runs setup, lint, docs and test",
    r"^(uv |gpu/bin/)?pip install": "installs from a network; scripts/setup.sh does the same",
    r"^python3(\.11)? -m venv": "the same",
    r"^torchx run -s (slurm|kubernetes|aws_batch)": "a cluster; tests/processes/test_torchx_components.py",
    r"^torchx run -s local_cwd": "tests/distributed/test_torchx_local.py runs both components",
    r"^kafka-acls\.sh": "an administrator of a cluster; tests/kafka/test_security.py gives these rights",
    r"^stream-ckpt list kafka://(broker1|127\.0\.0\.1:PORT)": "a cluster; tests/kafka/test_security.py",
    r"^stream-ckpt broker .*--secure": "tests/kafka/test_security.py starts it so",
    r"^stream-ckpt broker \w+ --dir my-broker$": "tests/kafka/test_broker.py, and the tutorial below",
    r"--engine ray://": "a cluster; tests/processes/test_ray.py starts one",
    r"^stream-ckpt recover ": "a log that was lost: tests/unit/test_recover.py",
    r"^stream-ckpt gc .*--give-up \d": "markers that are lost: tests/unit/test_giving_up.py",
    r"^stream-ckpt relay ": "a job of two tiers: tests/unit/test_tiers.py",
    r"^stream-ckpt (materialize OUTER|trim INNER) ": "the same: tests/kafka/test_kafka_tiers_joined.py",
    r"^python -m torchrec_stream_ckpt\.recipes\.files": "tests/unit/test_recipe_data.py, on each format of text",
    r"^stream-ckpt evolve-plan ": "tests/unit/test_cli_evolve.py, on models that fit",
    r"^stream-ckpt import ": "tests/distributed/test_migration_doc.py runs it on a checkpoint that fits",
    r"^stream-ckpt export file://FOLDER": "the same",
    r"--standby 60": "tests/distributed/test_standby.py: it waits for a trainer that dies",
    r"recipes/online_follow\.py|small --stream_ckpt file://ckpt &$": "tests/distributed/test_followed_model.py",
    r"recipes/(train_deepfm|resume_resharded)\.py": "tests/distributed/test_recipes.py, on less data",
    r"file://clicks-(ckpt|new)": "tests/distributed/test_evolve_guides.py, on less data",
    r"--parquet /": "tests/unit/test_parquet_sink.py",
    r"--redis redis://HOST": "tests/sinks/test_redis_sink.py, on a server that it starts",
    r"--follower HOST:PORT": "tests/unit/test_watch_followers.py, with followers that serve metrics",
    r"s3://BUCKET/PREFIX": "tests/s3/test_bucket_job.py, on a server that it starts",
    r"recipes/quickstart\.py": "tests/distributed/test_quickstart.py",
}
"""Commands that this file does not run, each with what does."""
SMALLER = shlex.split("--num_embeddings 300 --batch_size 16 --limit_train_batches 40 --marker_every 5")
"""What is added to a training command: of flags that are given twice the last one counts."""
ON_A_JOB = ("README", "quickstart", "inspect", "store", "operations", "observability", "sizing", "follow", "proof")
"""Pages whose commands look at a job that is there."""


def commands(page: Path) -> list[str]:
    """The command lines of a page's code blocks, without comments and the path of the environment."""
    found, fenced = [], False
    text = re.sub(r"```python\n.*?```", "", page.read_text().replace("\\\n", " "), flags=re.S)
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and _PROGRAM.match(line.strip().removeprefix("$ ")):
            bare = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
            found.append(re.sub(r"\s+", " ", re.sub(r"(?<!\S)\.venv/bin/", "", bare)))
    return found


def why_not(command: str) -> list[str]:
    return [pattern for pattern in NOT_RUN if re.search(pattern, command)]


def stream_ckpt(command: str, put_in: Mapping[str, str]) -> Result:
    """Run one line of the tool in this process."""
    line = re.sub(r"[\[\]]", "", command.partition(" | ")[0])
    for name, value in put_in.items():
        line = re.sub(rf"(?<![\w:/.]){re.escape(name)}(?![\w:])", value, line)
    arguments = shlex.split(line)[1:]
    endless = arguments[0] in {"follow", "watch", "materialize"} or (arguments[0] == "relay" and "--status" not in line)
    if endless and "--once" not in arguments:
        arguments.append("--once")
    done = call(*arguments)
    alert = arguments[0] == "watch" and "alerts" in done.output and '"alerts": []' not in done.output
    assert done.exit_code == alert, (line, done.output, done.exception)
    return done


def torchrun(command: str, folder: Path) -> Torchrun:
    """Start one ``torchrun --standalone --nproc_per_node N SCRIPT ...`` with its folders in ``folder``."""
    match = re.match(r"torchrun --standalone --nproc_per_node (\d) (\S+) (.*)", command)
    assert match is not None, command
    arguments = re.sub(r"file://(?!/)", f"file://{folder}/", match[3])
    return Torchrun(int(match[1]), ROOT / match[2], *shlex.split(arguments), *SMALLER)


def trained(command: str, folder: Path) -> str:
    """What a training run says that comes to its end."""
    code, said = torchrun(command, folder).end(600)
    assert code == 0, said
    return said


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``ckpt``, the job of the tutorial's first command, and ``saved``, what it is put back from."""
    folder = tmp_path_factory.mktemp("documented")
    first = next(line for line in commands(ROOT / "docs" / "tutorial.md") if line.startswith("torchrun"))
    first = first.replace("file://tutorial-ckpt", "file://ckpt")
    trained(f"{first} --tensorboard {folder}/scalars", folder)
    shutil.copytree(folder / "ckpt", folder / "saved")
    return folder


@pytest.fixture
def here(job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job as it was, in the working directory: its log names this place."""
    shutil.rmtree(job / "ckpt")
    shutil.copytree(job / "saved", job / "ckpt")
    monkeypatch.chdir(job)
    return job


def put_in(page: str, here: Path) -> dict[str, str]:
    """What the capitals and the markers of a page stand for: a busy machine commits fewer of them."""
    newest = str(Control(FileLog(here / "ckpt")).refresh().newest_of(1))
    found = {
        "URL": f"file://{here}/{'ckpt' if page == 'store' else 'folded'}",
        "URI": f"file://{here}/ckpt",
        "G:M": newest,
        "1:3": "1:1",
        "1:9": newest,
        "2:17": newest,
        "2:7": newest,
        "file://quickstart-ckpt": f"file://{here}/ckpt",
        "file:///ckpt/job": f"file://{here}/ckpt",
        "file:///mnt/serving/ckpt": f"file://{here}/served",
        "--tensorboard DIR": f"--tensorboard {here}/scalars",
        "--head DIR": f"--head {here}/head",
        "--head auto": f"--head {here}/auto",
    }
    return found | {f"{scheme}://DIR": f"{scheme}://{here}/{scheme}" for scheme in ("dcp", "safetensors", "parquet")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_run_or_named(page: Path) -> None:
    run_here = {*ON_A_JOB, "tutorial", "recipes"}
    unknown = [line for line in commands(page) if not why_not(line) and page.stem not in run_here]
    unknown += [line for line in commands(page) if len(why_not(line)) > 1 and not line.startswith("make")]
    assert unknown == []


def test_each_reason_names_a_command_and_what_runs_it_is_there() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.search(pattern, line) for line in lines)] == []
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"tests/\w+/\w+\.py", reason)}
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert len(lines) > 120


@pytest.mark.parametrize("page", ON_A_JOB)
def test_the_commands_on_a_job_run(page: str, here: Path) -> None:
    path = next(each for each in PAGES if each.stem == page)
    tables = re.search(r"`(\[\{.*?\}), \.\.\.\]`", path.read_text())
    (here / "tables.json").write_text(f"{tables[1]}]" if tables else "")
    for line in commands(path):
        if not why_not(line):
            stream_ckpt(line, put_in(page, here))


@pytest.mark.kafka
def test_the_tutorial_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    broker = said = ""
    for text in commands(ROOT / "docs" / "tutorial.md"):
        line = text.replace("HOST:PORT", broker)
        if line.startswith("stream-ckpt broker start"):
            started = stream_ckpt(f"{line} --with-parent --json", {})
            broker = json.loads(started.stdout)["bootstrap"]
        elif line.startswith("stream-ckpt broker stop"):
            stream_ckpt(line, {})
        elif why_not(line):
            continue
        elif line.endswith("> job.log 2>&1 &"):
            job = torchrun(line.partition(" > ")[0], tmp_path)
            for told in job.stdout:
                if "marker 2:" in told:  # what the page waits for in job.log
                    break
            job.kill()
        elif line.startswith("torchrun"):
            said = trained(line, tmp_path)
        else:
            stream_ckpt(line, {})
    assert "restored marker 1:" in said


def test_the_recipes_page_trains_on_two_ranks_and_goes_on_on_three(tmp_path: Path) -> None:
    first, second = [line for line in commands(ROOT / "docs" / "recipes.md") if not why_not(line)]
    assert "starting afresh" in trained(first, tmp_path)
    assert re.search(r"restored marker 1:\d+ \(step 40, written by 2 ranks\)", trained(second, tmp_path))
