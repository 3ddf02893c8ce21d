"""Dense state in an object store: trained on 2 ranks, restored on others, over a real S3 server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import jobs, ranks
from tests.command import ask
from tests.model import PLAN_2, PLAN_3, differences, trainer, truth
from tests.parts import failpoints, open_log
from tests.s3.server import SECRET, S3Server
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, MarkerFailedError, StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store

pytestmark = pytest.mark.distributed

STEPS = 5  # markers are at step 3 and at the end


@pytest.fixture
def settings(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamConfig:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))  # of the ranks
    return StreamConfig(
        uri=f"file://{tmp_path}/log",
        store=f"s3://{s3_server.bucket}/{uuid.uuid4().hex}",
        store_options=s3_server.options(),
        marker_every=3,
    )


def dense_objects(settings: StreamConfig, marker: str) -> set[str]:
    """Names of the dense files of a marker of generation 1."""
    store = open_store(settings.store_url, settings.store_options)
    prefix = f"/g00000001-m{marker:0>8}/"
    found = {entry.name.rpartition("/")[2] for entry in store.list("dense/") if prefix in entry.name}
    store.close()
    return found


def test_dense_state_goes_to_s3_and_comes_back_bit_for_bit(settings: StreamConfig, tmp_path: Path) -> None:
    truths = ranks.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})[0][1]
    assert not (tmp_path / "log/dense").exists()
    options = tmp_path / "options"
    assert isinstance(settings.store_options, dict)
    options.write_text("".join(f"{name}={value}\n" for name, value in settings.store_options.items()))
    given = ("--store-options", str(options))
    listed = ask("list", settings.uri, *given)["markers"]
    assert [(row["step"], row["restorable"]) for row in listed] == [(3, True), (STEPS, True)]
    verified = ask("verify", settings.uri, "--all", *given)
    assert all(row["dense_files"] == len(dense_objects(settings, row["marker"][2:])) >= 3 for row in verified)
    assert ask("show", settings.uri, *given)["dense"].startswith(f"{settings.store_url}/dense/")

    for marker, step in ((None, STEPS), ("1:1", 3)):
        restored = ranks.run(3, jobs.restore_with, PLAN_3, settings, marker, 2, {})
        state, at_step, _, _ = restored[0]
        assert at_step == step
        assert differences(truths[step], state) == []
    assert list((tmp_path / "scratch").iterdir()) == []

    store = open_store(settings.store_url, settings.store_options)
    lost = next(entry.name for entry in store.list("dense/") if entry.name.endswith("m00000001/.metadata"))
    store.delete(lost)
    reasons = {row["marker"]: row["reason"] for row in ask("list", settings.uri, *given)["markers"]}
    assert "dense state is missing" in reasons["1:1"]
    assert reasons["1:2"] == ""
    store.close()


def _one_rank_cannot_put(settings: StreamConfig) -> list[str]:
    job = trainer(PLAN_2)
    said = []
    with jobs.attach(job, settings) as checkpointer:
        for fuse in ("", "dense.put=raise", "dense.stored=raise", ""):
            failpoints.arm(fuse if dist.get_rank() == 1 else "")
            job.step()
            checkpointer.step()
            try:
                said.append(f"committed {checkpointer.mark().result(60).marker}")
            except MarkerFailedError as error:
                said.append(error.message)
    return said


def test_a_marker_that_one_rank_could_not_store_is_given_up_and_leaves_nothing(
    settings: StreamConfig, tmp_path: Path
) -> None:
    settings.marker_every = None
    first, second = ranks.run(2, _one_rank_cannot_put, settings)
    assert first == second
    assert first[0] == "committed 1"
    assert all("rank 1: dense state was not saved: OSError" in said for said in first[1:3])
    assert first[3] == "committed 4"
    assert [bool(dense_objects(settings, marker)) for marker in "1234"] == [True, False, False, True]
    assert list((tmp_path / "scratch").iterdir()) == []


def _restored(settings: StreamConfig) -> tuple[Any, Any]:
    job = trainer(PLAN_2)
    with jobs.attach(job, settings) as checkpointer:
        return checkpointer.restore(), truth(job)


def test_a_marker_whose_dense_state_was_altered_in_the_store_is_passed_over(
    settings: StreamConfig, s3_server: S3Server
) -> None:
    truths = ranks.run(2, jobs.train_with, PLAN_2, settings, STEPS, {})[0][1]
    place = s3_server.objects / settings.store_url.removeprefix("s3://")
    (part,) = place.glob("dense/*/g00000001-m00000002/__1_0.distcp")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    restored, state = ranks.run(2, _restored, settings)[0]
    assert str(restored.id) == "1:1"
    assert "dense state was altered" in restored.skipped[0]
    assert differences(truths[3], state) == []


def _attach_fails(settings: StreamConfig, kind: type[Exception]) -> str:
    job = trainer(PLAN_2)
    with pytest.raises(kind) as refused:
        StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changed", "kind", "said"),
    [
        ({"secret": "wrong"}, StoreUnavailableError, "the secret key does not match the access key"),
        ({"key": "AKNOBODY"}, StoreUnavailableError, "the store does not know this access key"),
        ({"config_kwargs": "{"}, ConfigError, "the store's option 'config_kwargs' is not JSON"),
    ],
)
def test_a_store_that_lets_nobody_in_is_said_at_attach_on_all_ranks(
    settings: StreamConfig, s3_server: S3Server, changed: dict[str, str], kind: type[Exception], said: str
) -> None:
    settings.store_options = s3_server.options(**changed)
    for message in ranks.run(2, _attach_fails, settings, kind, timeout_s=60):
        assert said in message
        assert SECRET not in message
        assert "Try: " in message or kind is ConfigError
    log = open_log(settings.uri)
    assert log.incarnation() is None
    log.close()


def test_settings_do_not_show_credentials(settings: StreamConfig) -> None:
    assert SECRET not in repr(settings)
