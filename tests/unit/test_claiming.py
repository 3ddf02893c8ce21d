"""Claiming a generation again when nobody knows whether the CLAIM has landed, and only on what is still the newest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.golden import make
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import CommitUnknownError, FencedError, LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.inner import Control, Tier
from torchrec_stream_ckpt.save import claims
from torchrec_stream_ckpt.save.generation import Opening, claim_generation
from torchrec_stream_ckpt.util.config import StreamConfig


def claim(tier: Tier, nonce: str | None = None, after: str | None = None) -> Claim:
    return claim_generation(tier, Opening(make.SCHEMA, 1, None, (0, 1), None, nonce=nonce, after=after))


def test_a_claim_that_landed_without_an_answer_is_not_taken_for_another_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(StreamConfig(uri=f"file://{tmp_path}"))
    first = claim(tier)
    real = Control.claim

    def unanswered(control: Control, record: Claim) -> None:
        real(control, record)
        raise LogUnavailableError("the log accepted a CLAIM, but does not show it")

    with monkeypatch.context() as patched:
        patched.setattr(Control, "claim", unanswered)
        with pytest.raises(LogUnavailableError):
            claim(tier, "mine", first.nonce)
    again = claim(tier, "mine", first.nonce)
    lineage = Control(FileLog(tmp_path)).refresh()
    assert (again.nonce, again.generation) == ("mine", lineage.newest_generation)
    assert lineage.stale == 0


def test_a_claim_on_what_is_not_the_newest_any_more_is_refused(tmp_path: Path) -> None:
    tier = open_tier(StreamConfig(uri=f"file://{tmp_path}"))
    first = claim(tier)
    other = claim(open_tier(StreamConfig(uri=f"file://{tmp_path}")))
    with pytest.raises(FencedError, match=f"generation {other.generation} has taken over"):
        claim(tier, "mine", first.nonce)
    assert Control(FileLog(tmp_path)).refresh().newest_generation == other.generation


def test_a_trainer_that_goes_on_after_a_loss_knows_its_own_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "_REOPEN_S", 0.0)
    tier = open_tier(StreamConfig(uri=f"file://{tmp_path}"))
    attached = SimpleNamespace(schema=make.SCHEMA, layout=None, tables=(0, 1), has_id_maps=False)
    mine = claims.Claims(tier, None, attached, 1)  # type: ignore[arg-type]
    lost, why, real = mine.claim(None, (0, 1)), StreamLostError("the log ends too early"), Control.claim

    def unanswered(control: Control, record: Claim) -> None:
        real(control, record)
        raise CommitUnknownError("nobody answered")

    with monkeypatch.context() as patched:
        patched.setattr(Control, "claim", unanswered)
        assert mine.claim_after_loss(lost, why) == ()
    gone_on = mine.claim_after_loss(lost, why)
    assert gone_on
    assert gone_on[0].generation == Control(FileLog(tmp_path)).refresh().newest_generation
