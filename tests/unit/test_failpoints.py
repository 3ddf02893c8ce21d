"""Fail points: off by default, counted, and each one is known to the chaos suite."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrec_stream_ckpt
from tests.parts import arm, failpoints
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.failpoints import failpoint


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def compiled_in() -> Counter[str]:
    """Names that the package passes to ``failpoint``, read from its source."""
    texts = (source.read_text() for source in Path(torchrec_stream_ckpt.__file__).parent.rglob("*.py"))
    return Counter(
        node.args[0].value
        for text in texts
        for node in (ast.walk(ast.parse(text)) if "failpoint(" in text else ())  # parsing all takes a second
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "failpoint"
        if isinstance(node.args[0], ast.Constant)
    )


def test_off_by_default() -> None:
    assert failpoints._armed == {}
    for name in compiled_in():
        failpoint(name)


def test_the_chosen_pass_fires_and_is_reported(tmp_path: Path) -> None:
    arm("segment.written=raise@3;commit.append=raise", tmp_path / "fired")
    failpoint("segment.written")
    failpoint("segment.written")
    failpoint("another")
    with pytest.raises(OSError, match=r"failpoint segment\.written") as caught:
        failpoint("segment.written")
    assert caught.value.errno == errno.EIO
    failpoint("segment.written")  # once
    with pytest.raises(OSError, match=r"commit\.append"):
        failpoint("commit.append")
    assert (tmp_path / "fired").read_text() == "segment.written\ncommit.append\n"


@pytest.mark.parametrize("spec", ["nonsense", "name=explode", "name=kill@0", "name=kill@x", "=kill"])
def test_a_spec_that_says_nothing_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="is not a failpoint"):
        arm(spec)


def test_the_environment_arms_a_process_that_dies_at_its_point(tmp_path: Path) -> None:
    program = (
        "from torchrec_stream_ckpt.util.failpoints import failpoint; failpoint('a'); failpoint('b'); print('alive')"
    )
    environment = {
        **os.environ,
        "STREAM_CKPT_FAILPOINTS": "b=kill",
        "STREAM_CKPT_FAILPOINTS_REPORT": str(tmp_path / "fired"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "fired").read_text() == "b\n"


OF_STORES = ("store.upload", "materialize.dense", "restore.chunk", "dense.put", "dense.stored")
"""Points that neither a trainer passes whose store is a folder, nor its materializer: tests of stores kill there."""


def test_trainers_trims_and_materializers_are_killed_at_every_point() -> None:
    from tests.faults import kills, materializer
    from tests.processes import (
        test_scrub_kills,
        test_step_kills,
    )
    from tests.unit import (
        test_marker_names,
        test_marker_values,
        test_mending,
        test_proof_checker,
        test_read_back,
        test_store_walk,
        test_trim,
    )

    names = compiled_in()
    in_units = (
        test_step_kills,
        test_marker_names,
        test_marker_values,
        test_trim,
        test_mending,
        test_scrub_kills,
        test_store_walk,
        test_proof_checker,
        test_read_back,
    )
    killed = {*kills.POINTS, *materializer.POINTS, *(point for each in in_units for point in each.POINTS)}
    killed |= {"recover.append", "recover.trim"}  # by test_recover
    killed |= {"end.append", "end.appended"}  # by test_ends
    killed |= {"import.rows"}  # by test_import_files
    of_jobs, killed_of_jobs = ({name for name in each if not name.startswith(OF_STORES)} for each in (names, killed))
    assert of_jobs == killed_of_jobs
    assert killed <= {*names}
    assert set(names.values()) == {1}, "a name stands at one place"
