"""Rows that are to be sent, as masks hand them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class KernelRows(NamedTuple):
    """Some rows of one kernel."""

    rows: torch.Tensor
    """Linear rows, int64, ascending, on the tables' device."""
    cuts: Sequence[int] | None = None
    """The place of each shard's first row in ``rows``, and the number of rows; None: the host has to look."""
