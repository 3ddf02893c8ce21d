"""A method of one object is watched: no copy of it is, and afterwards nothing is left."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch import nn

from torchrec_stream_ckpt.model.patch import Hook, patch, wrap


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self) -> None:
        self.count += 1

    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count


def test_a_call_is_told_first_and_then_made() -> None:
    counter, seen = Counter(), []
    undo = patch(counter, "add", lambda number: seen.append((number, counter.count)))
    assert counter.add(3) == 3
    assert seen == [(3, 0)]
    undo()
    assert counter.add(3) == 6
    assert len(seen) == 1
    assert "add" not in vars(counter)


@pytest.mark.parametrize("undone", [False, True], ids=["watched", "afterwards"])
@pytest.mark.parametrize("take", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["copy", "pickle"])
def test_a_copy_is_not_watched_and_acts_on_itself(take, undone: bool) -> None:  # type: ignore[no-untyped-def]
    counter, seen = Counter(), []
    undo = patch(counter, "add", seen.append)
    other = take(counter)
    again = take(other)
    if undone:
        undo()
    assert other.add(5) == 5
    assert again.add(7) == 7
    assert (seen, counter.count, other.count) == ([], 0, 5)


def test_a_module_that_holds_the_object_is_copied_with_it() -> None:
    counter, seen = Counter(), []
    patch(counter, "add", seen.append)
    other = copy.deepcopy(nn.Sequential(counter))
    assert other[0].add(2) == 2
    assert (seen, counter.count) == ([], 0)


def test_the_hook_of_a_copy_is_idle() -> None:
    counter, seen = Counter(), []
    handle = counter.register_forward_hook(Hook(lambda *_args: seen.append(1)))
    counter.register_load_state_dict_pre_hook(Hook(lambda *_args: seen.append(2)))
    other = copy.deepcopy(counter)
    other()
    other.load_state_dict({})
    assert seen == []
    counter()
    counter.load_state_dict({})
    assert seen == [1, 2]
    handle.remove()
    counter()
    assert seen == [1, 2]


def test_a_wrapper_that_stands_on_ours_keeps_working() -> None:
    counter, seen = Counter(), []
    undo = patch(counter, "add", lambda *_args: seen.append("ours"))
    undo_theirs = wrap(counter, "add", lambda real, *args: (seen.append("theirs"), real(*args))[1])
    counter.add()
    undo()
    assert counter.add() == 2
    assert seen == ["theirs", "ours", "theirs"]
    undo_theirs()
    assert counter.add() == 3
    assert seen == ["theirs", "ours", "theirs"]


def test_what_stood_there_before_comes_back() -> None:
    counter = Counter()
    theirs = lambda number=1: -number  # noqa: E731
    counter.add = theirs  # type: ignore[method-assign]
    undo = patch(counter, "add", lambda *_args: None)
    assert counter.add(2) == -2
    undo()
    assert vars(counter)["add"] is theirs
