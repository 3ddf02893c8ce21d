"""Settings from the environment."""

from __future__ import annotations

PREFIX = "STREAM_CKPT_"
"""What the names of our variables begin with."""
