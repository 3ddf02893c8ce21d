"""An old import path of a public name says where the name is now."""

from __future__ import annotations

from importlib import import_module

import pytest


@pytest.mark.parametrize("module", ["config", "types", "loader", "planner", "follower", "interchange"])
def test_an_old_path_names_the_new_one(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"has moved: import .* by `from torchrec_stream_ckpt import"):
        import_module(f"torchrec_stream_ckpt.{module}")


def test_a_path_that_never_was_is_just_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named .torchrec_stream_ckpt\.nothing."):
        import_module("torchrec_stream_ckpt.nothing")
