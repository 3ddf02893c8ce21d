"""A job's last word: what the ranks' words come to, and that nothing keeps a trainer that ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.format.end_note import End, Outcome
from torchrec_stream_ckpt.save import generation_end
from torchrec_stream_ckpt.save.generation_end import Ending, LastWord

FINISHED, FAILED, PREEMPTED = (LastWord(outcome) for outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.PREEMPTED))


class _Store:
    """As a store of torch.distributed, of one process."""

    def __init__(self, silent: threading.Event | None = None) -> None:
        self.values: dict[str, bytes] = {}
        self._silent = silent

    def set(self, name: str, value: str) -> None:
        self.values[name] = value.encode()

    def check(self, names: list[str]) -> bool:
        if self._silent is not None:
            self._silent.wait(600)
        return all(name in self.values for name in names)

    def get(self, name: str) -> bytes:
        return self.values[name]


class _Control:
    """Takes END, or refuses it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.said: list[End] = []
        self._error = error

    def end(self, end: End) -> None:
        if self._error is not None:
            raise self._error
        self.said.append(end)


def stream(control: _Control, *, busy: bool = False, fenced: object = None) -> Any:
    claim = SimpleNamespace(job=b"j" * 16, generation=4, nonce="mine")
    return SimpleNamespace(
        claim=claim,
        generation=SimpleNamespace(control=control),
        coordinator=SimpleNamespace(busy=busy, fenced=fenced),
    )


def say(words: list[LastWord | None], control: _Control | None = None, store: Any = None, **more: Any) -> list[str]:
    """Each rank but those that say nothing, rank 0 last; what is in the log then."""
    store, control = store or _Store(), control or _Control()
    for rank, word in reversed(list(enumerate(words))):
        if word is not None:
            ending_ = Ending(store, rank, len(words))
            ending_.say(stream(control, **more), 30, word, time.monotonic() + 0.2)
    assert all((end.generation, end.nonce, end.step) == (4, "mine", 30) for end in control.said)
    return [f"{end.outcome} {end.reason}".strip() for end in control.said]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([FINISHED], ["finished"]),
        ([FINISHED, FINISHED, FINISHED], ["finished"]),
        ([FINISHED, PREEMPTED, FINISHED], ["preempted rank 1:"]),
        ([PREEMPTED, LastWord(Outcome.FAILED, "KeyError"), FINISHED], ["failed rank 1: KeyError"]),
        ([LastWord(Outcome.FAILED, "KeyError"), LastWord(Outcome.FAILED, "OSError")], ["failed KeyError"]),
        ([FINISHED, None], []),
        ([FINISHED, None, LastWord(Outcome.FAILED, "OSError")], ["failed rank 2: OSError"]),
        ([FAILED, None], ["failed"]),
    ],
)
def test_the_job_has_finished_if_all_ranks_say_so(words: list[LastWord | None], said: list[str]) -> None:
    assert say(words) == said


def test_a_trainer_that_was_fenced_or_has_a_marker_in_flight_says_nothing() -> None:
    assert say([FINISHED], fenced=ValueError()) == []
    assert say([FINISHED], busy=True) == []


def test_a_log_that_takes_nothing_and_a_store_that_hangs_keep_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert say([FINISHED], _Control(LogUnavailableError("away"))) == []
    monkeypatch.setattr(generation_end, "JOIN_S", 0.1)
    silent = threading.Event()
    assert say([FINISHED, FINISHED], store=_Store(silent)) == []
    silent.set()
    assert say([FINISHED, FINISHED], store=SimpleNamespace()) == []  # it raises whatever it is asked


@pytest.mark.parametrize(
    ("error", "stopped", "expected"),
    [
        (None, "", "finished"),
        (SystemExit(), "", "finished"),
        (SystemExit(0), "", "finished"),
        (SystemExit(1), "", "failed SystemExit"),
        (SystemExit("no"), "", "failed SystemExit"),
        (SystemExit(143), "", "preempted SystemExit"),
        (KeyboardInterrupt(), "", "preempted KeyboardInterrupt"),
        (ZeroDivisionError(), "", "failed ZeroDivisionError"),
        (None, "SIGTERM", "preempted SIGTERM"),
        (SystemExit(143), "SIGTERM", "preempted SIGTERM"),
    ],
)
def test_what_is_in_flight_says_how_a_rank_has_ended(error: BaseException, stopped: str, expected: str) -> None:
    word = LastWord.of(None, error, stopped)
    assert f"{word.outcome} {word.reason}".strip() == expected


def test_a_class_with_a_wild_name_is_a_short_line() -> None:
    wild = type("Bad\nName" * 100, (Exception,), {})
    word = LastWord.of(None, wild())
    assert len(word.reason) == 200
    assert word.reason.isprintable()


def test_an_outcome_is_one_of_three() -> None:
    assert LastWord.of("finished", ValueError()) == FINISHED
    assert LastWord.of("failed", ValueError()) == LastWord(Outcome.FAILED, "ValueError")
    with pytest.raises(ConfigError, match="finished, preempted, failed"):
        LastWord.of("ok", None)
