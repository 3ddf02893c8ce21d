"""A spare that has fenced the trainer takes over, whatever does not answer meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests import builders
from torchrec_stream_ckpt.config import Takeover
from torchrec_stream_ckpt.errors import FencedError, LogUnavailableError, StoreUnavailableError
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.trainer.standby import Standby
from torchrec_stream_ckpt.types import MarkerId

SILENT = LogUnavailableError("the broker does not answer", hint="bring it back")


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


def spare(control: _Control, load: Callable[[], Any]) -> Standby:
    log = SimpleNamespace(incarnation=lambda: SimpleNamespace(id="log-1"), ends=lambda generation, partitions: {0: 1})
    team = SimpleNamespace(rank=0, on_rank0=lambda action: action(), together=lambda action: action())
    takeover = Takeover(after_s=0.05, poll_s=0.01)
    return Standby(team, log, control, load, lambda route: 0, takeover, "file:///job")  # type: ignore[arg-type]


def loaded(control: _Control) -> Callable[[], Any]:
    plan = SimpleNamespace(merged={}, marker=MarkerId(1, 1), source="store")
    return lambda: (plan, SimpleNamespace(all_shards=dict), 1)


def test_a_log_that_is_silent_right_after_the_fence_does_not_end_the_spare() -> None:
    control = _Control(refresh_fails=3)
    assert spare(control, loaded(control)).wait() == MarkerId(1, 1)
    assert (len(control.claims), control.refresh_fails) == (1, 0)


def test_a_store_that_is_away_after_the_fence_is_waited_for() -> None:
    control, away = _Control(), [StoreUnavailableError("no answer")] * 4
    load = loaded(control)

    def loading() -> Any:
        if not control.claims:
            raise away[0]
        if away:
            raise away.pop()
        return load()

    assert spare(control, loading).wait() == MarkerId(1, 1)
    assert not away


def test_a_fence_that_came_although_nobody_answered_is_not_taken_for_another_spares() -> None:
    late: list[Claim] = []

    def unanswered(claim: Claim) -> None:
        late.append(claim)
        raise SILENT

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
