"""Claiming a generation again when nobody knows whether the CLAIM has landed, and only on what is still the newest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import builders
from tests.golden import make
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    FencedError,
    JobFinishedError,
    LogUnavailableError,
    StoreUnavailableError,
    StreamCkptError,
    StreamLostError,
)
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control, Tier
from torchrec_stream_ckpt.job.standby import Standby
from torchrec_stream_ckpt.save import claims
from torchrec_stream_ckpt.save.generation import Opening, claim_generation
from torchrec_stream_ckpt.util.config import StreamConfig, Takeover
from torchrec_stream_ckpt.util.types import MarkerId


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


# A spare that has fenced the trainer takes over, whatever does not answer meanwhile.


SILENT = LogUnavailableError("the broker does not answer", hint="bring it back")
UNKNOWN = CommitUnknownError("the broker did not say whether it has the record", hint="ask the log")


@dataclass
class _Control:
    """A control partition with one marker, which fails as it is told to."""

    lineage: Lineage = field(default_factory=Lineage)
    claims: list[Claim] = field(default_factory=list)
    refresh_fails: int = 0
    """So many times, once a fence was written."""
    claim_fails: list[Callable[[Claim], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lineage.apply(builders.claim(1))
        self.lineage.apply(builders.commit(1, 1))

    def refresh(self) -> Lineage:
        if self.claims and self.refresh_fails:
            self.refresh_fails -= 1
            raise SILENT
        return self.lineage

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)
        if self.claim_fails:
            self.claim_fails.pop(0)(claim)
        self.lineage.apply(claim)
        if self.lineage.claims[claim.generation].nonce != claim.nonce:
            raise FencedError("another one was first")


def spare(
    control: _Control, load: Callable[[], Any], advance: Callable[[Any, Any], int] = lambda held, route: 0
) -> Standby:
    log = SimpleNamespace(incarnation=lambda: SimpleNamespace(id="log-1"), ends=lambda generation, partitions: {0: 1})
    team = SimpleNamespace(rank=0, on_rank0=lambda action: action(), together=lambda action: action())
    takeover = Takeover(after_s=0.05, poll_s=0.01)
    claims = SimpleNamespace(after=None, nonce="that of the next claim")
    tier = SimpleNamespace(log=log, control=control, uri="file:///job")
    session = SimpleNamespace(newest_rows=load, advance=advance)
    return Standby(team, tier, session, takeover, claims)  # type: ignore[arg-type]


def loaded(control: _Control) -> Callable[[], Any]:
    plan = SimpleNamespace(merged={}, marker=MarkerId(1, 1), source="store")
    return lambda: SimpleNamespace(plan=plan, route=SimpleNamespace(all_shards=dict), rows=1)


def test_a_log_that_is_silent_right_after_the_fence_does_not_end_the_spare() -> None:
    control = _Control(refresh_fails=3)
    assert spare(control, loaded(control)).wait() == MarkerId(1, 1)
    assert (len(control.claims), control.refresh_fails) == (1, 0)


def test_a_store_that_is_away_after_the_fence_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a marker when it fences; what was committed just before the fence is in a store that is away."""
    away, newest = [StoreUnavailableError("no answer")] * 4, builders.commit(1, 2)

    def committed_before(claim: Claim) -> None:
        control.lineage.apply(newest)

    def locating(*_: object, **__: object) -> Any:
        if away:
            raise away.pop()
        route = SimpleNamespace(commit=newest, shards={}, check=lambda log: None)
        route.complete = lambda log, known: route
        return route

    monkeypatch.setattr("torchrec_stream_ckpt.job.standby.locate", locating)
    control = _Control(claim_fails=[committed_before])
    assert spare(control, loaded(control)).wait() == MarkerId(1, 2)
    assert (len(control.claims), away) == (1, [])


def test_rows_of_an_advance_that_broke_off_do_not_stay_when_the_trainer_goes_on_from_an_older_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control, did, silent = _Control(), list[str](), False

    def load() -> Any:
        did.append(f"load {control.lineage.newest.id}")  # type: ignore[union-attr]
        plan = SimpleNamespace(merged={}, marker=control.lineage.newest.id, source="log")  # type: ignore[union-attr]
        return SimpleNamespace(plan=plan, route=SimpleNamespace(all_shards=dict), rows=1)

    def advance(_: object, route: Any) -> int:
        did.append(f"advance to {route.commit.id}")
        if silent:
            raise SILENT
        return 1

    def locating(lineage: Lineage, marker: MarkerId, since: MarkerId) -> Any:
        route = SimpleNamespace(commit=lineage.find(marker), shards={}, check=lambda log: None)
        route.complete = lambda log, known: route
        return route

    monkeypatch.setattr("torchrec_stream_ckpt.job.standby.locate", locating)
    waiting = spare(control, load, advance)
    waiting.follow()
    for marker in (2, 4):
        silent = True
        control.lineage.apply(builders.commit(1, marker))
        with pytest.raises(LogUnavailableError):
            waiting.follow()
        silent = False
        if marker == 2:  # the next one leads through it: its rows are written again
            control.lineage.apply(builders.commit(1, 3))
            waiting.follow()
    control.lineage.apply(builders.claim(2, parent=MarkerId(1, 3)))
    control.lineage.apply(builders.commit(2, 4))
    waiting.follow()
    assert did == ["load 1:1", "advance to 1:2", "advance to 1:3", "advance to 1:4", "load 2:4"]


@pytest.mark.parametrize("error", [SILENT, UNKNOWN])
def test_a_fence_that_came_although_nobody_answered_is_not_taken_for_another_spares(error: StreamCkptError) -> None:
    late: list[Claim] = []

    def unanswered(claim: Claim) -> None:
        late.append(claim)
        raise error

    def overtaken(claim: Claim) -> None:
        control.lineage.apply(late[0])

    control = _Control(claim_fails=[unanswered, overtaken])
    assert spare(control, loaded(control)).wait() == MarkerId(1, 1)
    assert len({claim.nonce for claim in control.claims}) == 1


def test_a_spare_that_another_one_has_fenced_ends() -> None:
    def overtaken(claim: Claim) -> None:
        control.lineage.apply(builders.claim(claim.generation))

    control = _Control(claim_fails=[overtaken])
    with pytest.raises(FencedError, match="another one was first"):
        spare(control, loaded(control)).wait()


@pytest.mark.parametrize("world", [2, 0])
def test_a_spare_that_waited_while_somebody_else_took_over_ends(world: int) -> None:
    """Its tables hold a marker from which the other one has gone on: a CLAIM on that would fence a living trainer."""
    control = _Control()
    waiting = spare(control, loaded(control))
    assert waiting.wait() == MarkerId(1, 1)
    tries = 0

    def claim() -> None:
        nonlocal tries
        tries += 1
        control.lineage.apply(replace(builders.claim(3), nonce="of another one", world=world))
        raise SILENT

    with pytest.raises(FencedError, match="generation 3 has taken over this job"):
        waiting.outlast(claim)
    assert tries == 1


def test_a_spares_own_claim_that_landed_without_an_answer_does_not_end_it() -> None:
    control = _Control()
    waiting = spare(control, loaded(control))
    waiting.wait()
    tries = 0

    def claim() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            control.lineage.apply(replace(builders.claim(3), nonce="that of the next claim"))
            raise UNKNOWN
        return "claimed"

    assert waiting.outlast(claim) == "claimed"


def test_a_trainer_that_began_between_the_fence_and_its_answer_is_not_fenced() -> None:
    def overtaken(claim: Claim) -> None:
        control.lineage.apply(claim)
        control.lineage.apply(replace(builders.claim(claim.generation + 1), nonce="of another one"))

    control = _Control(claim_fails=[overtaken])
    with pytest.raises(FencedError, match="generation 3 has taken over"):
        spare(control, loaded(control)).wait()


@pytest.mark.parametrize(("outcome", "at_once"), [("failed", True), ("preempted", False)])
def test_a_spare_takes_over_at_once_from_a_trainer_that_failed_and_after_a_while_from_one_that_was_preempted(
    outcome: str, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = _Control()
    control.lineage.apply(builders.end(1, outcome))
    waiting, waits = spare(control, loaded(control)), []
    waiting.pulse.after_s = 600.0

    def nap(_: float) -> None:
        waits.append(len(control.claims))
        waiting.pulse.after_s = -1.0

    monkeypatch.setattr("torchrec_stream_ckpt.job.standby.time.sleep", nap)
    assert waiting.wait() == MarkerId(1, 1)
    assert waits == ([] if at_once else [0])


def test_a_spare_of_a_finished_job_ends_and_fences_nobody() -> None:
    control = _Control()
    control.lineage.apply(builders.end(1))
    with pytest.raises(JobFinishedError, match="has finished at step 70"):
        spare(control, loaded(control)).wait()
    assert control.claims == []
