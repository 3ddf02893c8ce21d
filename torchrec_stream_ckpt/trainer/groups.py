"""The process groups of one checkpointer, and what talks over them."""

from __future__ import annotations

from torchrec_stream_ckpt.commit.collective import Team, end_group, new_group, outlast
from torchrec_stream_ckpt.commit.roll import Roll

PEERS_S = 20.0
"""Other ranks are waited for so much longer than for the log."""


class Groups:
    """One group for each thread and purpose: calls on one group are in the same order on every rank. Collective.

    Args:
        commit_timeout_s: How long a commit may take.
    """

    def __init__(self, commit_timeout_s: float) -> None:
        bound_s = commit_timeout_s + PEERS_S
        self.vote_s = 2 * commit_timeout_s + 60
        """How long a vote may take."""
        self.step, commit_group, dense_group = (new_group(self.vote_s) for _ in range(3))
        self.dense = outlast(dense_group)
        """Dense state is saved over it, on a thread of its own."""
        self.roll = Roll.of(self.step)
        """Tells where the ranks are."""
        self.team = Team(self.step, self.roll, bound_s)
        """The training threads; over ``step``, as votes are."""
        self.commit_team = Team(outlast(commit_group), self.roll, bound_s, in_call=False)
        """The commit threads."""

    def close(self) -> None:
        """End their threads and sockets here: whatever still refers to this object keeps none alive."""
        self.roll.close()
        self.team.close()
        self.commit_team.close()
        end_group(self.dense)
        del self.dense, self.step
