"""Every error says what failed, where, and what to try, and survives the way from one rank to another."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from torchrec_stream_ckpt import errors
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MissingObjectError,
    OtherLogError,
    StreamCkptError,
    located,
)

CLASSES = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, StreamCkptError)]


def test_an_error_prints_what_where_and_what_to_try() -> None:
    error = CorruptionError("checksum does not match", hint="restore another marker", rank=3, path=Path("/log/x"))
    assert error.headline == "checksum does not match [rank=3, path=/log/x]"
    assert str(error) == "checksum does not match [rank=3, path=/log/x]\n  Try: restore another marker"


def test_an_error_without_hint_or_place_is_one_line() -> None:
    assert str(StreamCkptError("it failed")) == "it failed"


def test_damage_is_never_named_without_what_to_try() -> None:
    error = MissingObjectError("no such object")
    assert "\n  Try: restore another marker (" in str(error)
    with pytest.raises(MissingObjectError) as caught, located("put it back", path="x"):
        raise error
    assert str(caught.value) == "no such object [path=x]\n  Try: put it back"
    with pytest.raises(OtherLogError) as caught, located(path="x"):
        raise OtherLogError("of another job")
    assert str(caught.value).endswith("Try: use the log and the store of this job")


def test_places_that_are_unknown_are_left_out() -> None:
    error = StreamCkptError("it failed", rank=None, seq=0)
    assert error.where == {"seq": 0}
    assert error.headline == "it failed [seq=0]"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling(kind: type[StreamCkptError]) -> None:
    error = kind("it failed", hint="mend it", table="t", rank=2)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.message, copy.hint, copy.where, str(copy)) == (error.message, error.hint, error.where, str(error))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_is_one_of_ours_and_says_what_to_do(kind: type[StreamCkptError]) -> None:
    assert issubclass(kind, StreamCkptError)
    assert kind.__doc__


def test_a_wrong_call_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)
