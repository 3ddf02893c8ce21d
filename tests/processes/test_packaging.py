"""What is published: the source distribution is the repository, and its wheel works where nothing else of it is."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setuptools builds the package; the lock has it")

ROOT = Path(__file__).parents[2]
NOT_OURS = (".venv*", ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".cache")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
USER = """
from torchrec_stream_ckpt import GlobalBatches, Restored, StreamCheckpointer, StreamConfig, TrackedLoader

def batch(epoch: int, rows: range, size: int) -> list[int]:
    return list(rows)

loader = TrackedLoader(GlobalBatches(batch, samples=9, batch_size=3, rank=0, world=1))
config = StreamConfig(uri="file://ckpt", marker_every=5)
reveal_type(loader)
reveal_type(StreamCheckpointer.restore)
StreamConfig(uri=3)
"""


@dataclass(frozen=True)
class Published:
    sdist: Path
    wheel: Path
    python: Path
    """Of a virtual environment with the wheel in it; all else comes from this one."""

    def run(self, *command: str, code: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        folder = self.wheel.parent
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            return email.message_from_bytes(wheel.read(name))


def build(source: Path, kind: str, out: Path) -> Path:
    """Without a network: the backend as it is installed here."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    folder = tmp_path_factory.mktemp("published")
    out = folder / "dist"
    out.mkdir()
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=shutil.ignore_patterns(*NOT_OURS))
    sdist = build(folder / "tree", "sdist", out)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    [source] = (folder / "unpacked").iterdir()
    wheel = build(source, "wheel", out)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=300)
    python = folder / "venv" / "bin" / "python"
    [site] = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, timeout=300)
    yield Published(sdist, wheel, python)
    shutil.rmtree(folder)


def test_the_source_distribution_is_the_whole_repository(published: Published) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: what belongs to the repository is not known")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True).stdout
    ours = {name for name in found.split("\0") if (ROOT / name).is_file()}
    with tarfile.open(published.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {name for name in ours - held if not name.startswith(".venv")} == set()


def test_the_wheel_has_one_name_and_what_it_needs(published: Published) -> None:
    with zipfile.ZipFile(published.wheel) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"torchrec_stream_ckpt"}
    package = {name.removeprefix("torchrec_stream_ckpt/") for name in names}
    assert {"py.typed", "extras/broker/pom.xml", "components/example.torchxconfig"} <= package
    assert ("native/libkernel.so" in package) == (not published.wheel.stem.endswith("-py3-none-any")), "the tag says so"
    for folder, there in (("recipes", "recipes"), ("components", "torchx_components")):
        assert {f"{folder}/{path.name}" for path in (ROOT / there).glob("*.py")} <= package


def test_the_tools_run(published: Published) -> None:
    assert "verify" in published.run(str(published.python.with_name("stream-ckpt")), "--help")


def test_recipes_and_components_are_found(published: Published) -> None:
    python = str(published.python)
    recipes, components = (
        Path(published.run(python, "-m", f"torchrec_stream_ckpt.{name}").strip()) for name in ("recipes", "components")
    )
    assert recipes.parent == components.parent
    assert published.python.parent.parent in recipes.parents
    assert "--limit_train_batches" in published.run(python, str(recipes / "train_pnn.py"), "--help")
    component = ("run", "-s", "local_cwd", "--dryrun", f"{components / 'train.py'}:dlrm", "--", "--synthetic", "small")
    said = published.run(python, "-m", "torchx.cli.main", *component)
    assert "torchrec_stream_ckpt.recipes.train_dlrm" in said


def test_a_user_of_mypy_sees_the_types(published: Published) -> None:
    folder = published.wheel.parent
    (folder / "user.py").write_text(USER)
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    mypy = (sys.executable, "-m", "mypy", "--python-executable", str(published.python), "--cache-dir", str(folder))
    said = published.run(*mypy, "user.py", code=1)
    assert 'Revealed type is "torchrec_stream_ckpt.loaders.tracked_loader.TrackedLoader[list[int]]"' in said.replace(
        "builtins.", ""
    )
    assert "Restored | None" in said.replace("torchrec_stream_ckpt.util.types.", "")
    assert 'Argument "uri" to "StreamConfig" has incompatible type "int"' in said
    assert said.count("error:") == 1


def test_the_registry_shows_no_link_that_leads_nowhere(published: Published) -> None:
    page = published.metadata().get_payload()
    assert isinstance(page, str)
    assert "# torchrec_stream_ckpt" in page
    targets = [part.partition(")")[0] for part in page.split("](")[1:]]
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


def test_links_lead_to_the_source_once_it_has_an_address() -> None:
    namespace = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    exec(compile((ROOT / "setup.py").read_text(), "setup.py", "exec"), namespace)
    page = namespace["registry_page"]
    assert callable(page)
    text = "[a `b`](docs/a.md#x), ![p](docs/img/p.svg), [c](#here), [d](https://d)"
    at = "https://host/us/blob/main/"
    assert page(text, at) == text.replace("(docs", f"({at}docs")
    assert page(text, None) == "a `b`, , [c](#here), [d](https://d)"


def test_extras_bring_what_hints_say(published: Published) -> None:
    from torchrec_stream_ckpt.errors import TORCH_HINT

    extras = PYPROJECT["project"]["optional-dependencies"]
    [torchrec] = [line for line in (ROOT / "requirements" / "cpu.in").read_text().splitlines() if line[0] != "#"]
    assert f"pip install --no-deps {torchrec}" in TORCH_HINT
    assert torchrec in extras["cuda"]
    assert not [line for line in extras["cpu"] if line.partition("==")[0] in ("torchrec", "fbgemm-gpu")]
    metadata = published.metadata()
    assert {"cpu", "cuda", "torchx"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["Project-URL"]
    assert metadata["Author"]


def test_an_editable_install_shows_the_types_too() -> None:
    assert "editable_mode=compat" in (ROOT / "scripts" / "setup.sh").read_text()
