"""A spare, and a replica that follows, with tables on a GPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from tests.gpu.job import TABLES, Build, Job, attach, make, run, truth
from tests.model import differences
from torchrec_stream_ckpt import FollowedTables, Takeover, follow

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BUILDS = [Build(optimizer="adam"), Build(kernel="fused_uvm"), Build(kernel="fused_uvm_caching")]


class _FailedError(Exception):
    """What ends a trainer."""


def _weights(job: Job) -> dict[str, torch.Tensor]:
    return {name: truth(job)[f"{name}.weight"] for name, *_ in TABLES}


@pytest.mark.parametrize("given", [False, True], ids=["new-tensors", "given-tensors"])
def test_followed_tables_on_a_gpu_are_those_of_each_marker(given: bool, device: torch.device, tmp_path: Path) -> None:
    job = make(Build(), device)
    into = {f"embeddings.{name}": torch.zeros(rows, dim, device=device) for name, rows, dim, _ in TABLES}
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 2)
        checkpointer.mark().result(60)
        with FollowedTables(follow(f"file://{tmp_path}"), into if given else None, device=device) as tables:
            for _ in range(3):
                tables.advance()
                with tables.reading() as served:
                    expected = _weights(job)
                    for name, weights in expected.items():
                        followed = served.tables[f"embeddings.{name}"]
                        assert followed.is_cuda
                        assert torch.equal(followed.cpu(), weights), name
                run(job, checkpointer, 2)
                checkpointer.mark().result(60)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: f"{build.optimizer}-{build.kernel}")
def test_a_spare_on_a_gpu_takes_over_and_goes_on(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with contextlib.suppress(_FailedError), attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 3)
        checkpointer.mark().result(60)
        run(job, checkpointer, 2)
        checkpointer.mark().result(60)
        raise _FailedError
    expected = truth(job)
    (tmp_path / "now").touch()
    spare = make(build, device)
    spare.step()  # another state: all of it must be replaced
    with attach(spare, tmp_path) as checkpointer:
        taken = checkpointer.standby(Takeover(after_s=0.1, trigger=tmp_path / "now", poll_s=0.02))
        assert taken is not None
        assert differences(expected, truth(spare)) == []
        random = torch.cuda.get_rng_state()
        losses = [job.step() for _ in range(3)]
        torch.cuda.set_rng_state(random)
        assert [spare.step() for _ in range(3)] == losses
        checkpointer.step()
        checkpointer.mark().result(60)
