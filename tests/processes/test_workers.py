"""Files of tests in forked workers: what each test came to is reported once, and a worker that dies is named."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests import forks

FILES = {
    "one/test_a.py": """
        import pytest

        @pytest.fixture(scope="module")
        def torn_down(tmp_path_factory):
            yield
            (tmp_path_factory.getbasetemp().parent / "torn down").touch()

        def test_passes(torn_down, tmp_path): assert tmp_path.parts[-2].startswith("worker-")
        def test_fails(): print("printed here"); assert 1 + 1 == 3
        @pytest.mark.skip
        def test_is_skipped(): pass
    """,
    "one/test_b.py": """
        import os, signal

        def test_passes(): pass
        def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
        def test_never_runs(): pass
    """,
    "two/test_c.py": "def test_passes(): pass",
}


def run(folder: Path, *arguments: str) -> int:
    given = ("-c", str(folder / "pytest.ini"), "--basetemp", str(folder / "temp"))
    return forks.call(forks.run_pytest, folder / "output", *given, *arguments, str(folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_what_each_test_came_to_is_reported_once(folder: Path) -> None:
    assert run(folder, "-k", "not dies", "--durations=1") == 1
    said = (folder / "output").read_text()
    assert "1 failed, 4 passed, 1 skipped, 1 deselected" in said, said
    assert "assert (1 + 1) == 3" in said
    assert "printed here" in said
    assert "slowest" in said
    assert (folder / "temp" / "torn down").exists()


def test_a_worker_that_dies_ends_the_run_and_its_test_is_named(folder: Path) -> None:
    assert run(folder, "--workers", "2", "-k", "not fails") == 3
    assert "a worker ended with -9 in or after one/test_b.py::test_dies" in (folder / "output").read_text()
