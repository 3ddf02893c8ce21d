"""From the ring to the log: a frame is kept until it is acknowledged, whatever happens to its writer.

The writer here is scripted: a real log cannot be made to fail at a chosen call.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.builders import JOB
from tests.parts import Ack, FrameRing
from torchrec_stream_ckpt.errors import LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES, Header, Kind, parse_header, payload_of
from torchrec_stream_ckpt.log import publisher
from torchrec_stream_ckpt.log.flight import StreamEnd
from torchrec_stream_ckpt.log.publisher import Publisher

WAIT_S = 20.0
_number = itertools.count()


class Script:
    """A log in memory whose writers fail at chosen calls, counted over all of its writers."""

    def __init__(self) -> None:
        self.durable: list[bytes] = []
        """Frames in the order in which they reached the log, repeated ones too."""
        self.opened: list[int] = []
        self.closed = 0
        self.calls: dict[str, int] = {"open": 0, "send": 0, "poll": 0}
        self.failing: dict[tuple[str, int], str] = {}
        self.failed: list[tuple[str, int]] = []
        self.jump = 0
        """The next frame lies so far from where the log ended, once."""
        self.lost_acks = 0
        """So many of the next polls write frames and then fail: nobody hears that they arrived."""
        self.taking = threading.Event()
        """While clear, nothing is acknowledged."""
        self.taking.set()

    def fail_at(self, call: str, number: int) -> None:
        """Fail the call of this name with this number (from 1)."""
        self.failing[call, number] = "scripted"

    def count(self, call: str) -> None:
        self.calls[call] += 1
        key = (call, self.calls[call])
        if self.failing.pop(key, None):
            self.failed.append(key)
            raise LogUnavailableError(f"{call} {key[1]} fails by script")

    def open(self, resume_at: int) -> Writer:
        self.count("open")
        self.opened.append(resume_at)
        return Writer(self, resume_at)

    @property
    def seqs(self) -> list[int]:
        return [parse_header(frame).seq for frame in self.durable]

    def unique(self) -> list[bytes]:
        """The frames as a reader sees them: the first of each seq, in order."""
        return list(dict.fromkeys(self.durable))


class Writer:
    """One scripted writer; offsets count frames times 1000 so that they differ from seqs."""

    how, origin = "script", None

    def __init__(self, script: Script, resume_at: int) -> None:
        self._script = script
        self._end = resume_at
        self._sent: list[memoryview] = []

    def send(self, frame: memoryview) -> None:
        self._script.count("send")
        self._sent.append(frame)

    def poll(self, timeout_s: float) -> list[Ack]:
        self._script.count("poll")
        if not self._script.taking.is_set():
            self._script.taking.wait(timeout_s)
            return []
        self._script.durable += map(bytes, self._sent)
        acks = []
        if self._sent:
            self._end, self._script.jump = self._end + self._script.jump, 0
        for _ in self._sent:
            acks.append(Ack(self._end, self._end + 1000))
            self._end += 1000
        self._sent.clear()
        if acks and self._script.lost_acks:
            self._script.lost_acks -= 1
            raise LogUnavailableError("the answer was lost")
        if not acks:
            time.sleep(0.001)
        return acks

    def waits_for(self) -> str:
        return "broker 7"

    def close(self) -> None:
        self._script.closed += 1


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_BACKOFF_S", (0.001, 0.01))


@pytest.fixture
def ring() -> FrameRing:
    return FrameRing(4 * MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def stream(script: Script, ring: FrameRing) -> Iterator[Publisher]:
    started = Publisher(script.open, ring)
    yield started
    script.taking.set()
    started.close(WAIT_S)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def until_ended(stream: Publisher) -> None:
    until(lambda: not stream._thread.is_alive())


def submit(stream: Publisher, ring: FrameRing, count: int, kind: Kind = Kind.ROWS) -> list[int]:
    """Submit frames whose payload tells them apart; the seqs they got."""
    seqs = []
    for _ in range(count):
        buffer = ring.acquire(wait_s=WAIT_S)
        assert buffer is not None
        buffer.put_json(Header(kind, JOB, 1), b'{"frame":%d}' % next(_number))
        seqs.append(stream.submit(buffer))
    return seqs


def check_whole(script: Script, count: int) -> None:
    """A reader that drops repeated frames sees seq 0 to count-1, chained, each checksum right."""
    chain = 0
    found = script.unique()
    assert [parse_header(frame).seq for frame in found] == list(range(count))
    for frame in found:
        header = parse_header(frame)
        payload_of(header, frame)
        assert header.chain == chain
        chain = header.header_crc


def test_frames_are_numbered_chained_and_sent_in_order(script: Script, stream: Publisher, ring: FrameRing) -> None:
    assert submit(stream, ring, 50) == list(range(50))
    until(lambda: stream.pending == 0)
    assert script.seqs == list(range(50))
    check_whole(script, 50)
    assert stream.num_bytes == sum(map(len, script.durable))


def test_a_few_rows_wait_for_a_mark_or_for_a_pause(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_PAUSE_S", 3600.0)
    ring = FrameRing(8 * MAX_FRAME_BYTES, 0)
    stream = Publisher(script.open, ring)
    submit(stream, ring, 1)
    time.sleep(0.1)  # it has looked by then
    assert script.durable == []
    submit(stream, ring, 1, Kind.MARK)
    until(lambda: stream.pending == 0)
    submit(stream, ring, ring.capacity // 2)  # enough, although no MARK comes
    until(lambda: stream.pending == 0)
    submit(stream, ring, 1)
    assert stream.close(WAIT_S)
    check_whole(script, 2 + ring.capacity // 2 + 1)


def test_a_publisher_at_rest_sleeps_until_a_frame_comes(
    script: Script, ring: FrameRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woken by nothing else: a test would time out, not lose a race, if a frame, a loss or a close did not wake it."""
    monkeypatch.setattr(publisher, "IDLE_S", 3600.0)
    stream = Publisher(script.open, ring)
    for frames in (1, 2):
        submit(stream, ring, 1)
        until(lambda frames=frames: len(script.durable) == frames and stream.pending == 0)  # type: ignore[misc]
        looks = script.calls["poll"]
        time.sleep(0.3)
        assert script.calls["poll"] <= looks + 1  # the look that was under way
    assert stream.close(WAIT_S)
    other = Publisher(script.open, ring)
    time.sleep(0.05)
    other.discard(StreamLostError("the log was cut", hint="none"), WAIT_S)
    assert script.closed == 2
    check_whole(script, 2)


def test_rows_are_sent_once_no_more_come(script: Script, stream: Publisher, ring: FrameRing) -> None:
    submit(stream, ring, 1)
    until(lambda: stream.pending == 0)
    check_whole(script, 1)


@pytest.mark.parametrize("call", ["open", "send", "poll"])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_failing_call_loses_nothing_and_keeps_seqs(script: Script, ring: FrameRing, call: str, number: int) -> None:
    script.fail_at(call, number)
    if call == "open":
        for earlier in range(1, number):
            script.fail_at("open", earlier)
    stream = Publisher(script.open, ring)
    for _ in range(20):
        submit(stream, ring, 1)
        until(lambda: stream.pending == 0)
    assert stream.close(WAIT_S)
    assert (call, number) in script.failed
    check_whole(script, 20)


def test_frames_whose_acknowledgement_was_lost_are_sent_again_unchanged(
    script: Script, stream: Publisher, ring: FrameRing
) -> None:
    script.lost_acks = 3
    submit(stream, ring, 4)
    until(lambda: stream.pending == 0)
    check_whole(script, 4)
    assert len(script.durable) > 4
    assert len(set(script.durable)) == 4


def test_a_new_writer_resumes_behind_what_was_acknowledged(script: Script, stream: Publisher, ring: FrameRing) -> None:
    submit(stream, ring, 3)
    until(lambda: stream.pending == 0)
    script.lost_acks = 1
    submit(stream, ring, 2)
    until(lambda: stream.pending == 0)
    assert script.opened == [0, 3000]
    assert script.closed == 1
    check_whole(script, 5)


def test_a_frame_is_kept_until_it_is_acknowledged(script: Script, stream: Publisher, ring: FrameRing) -> None:
    script.taking.clear()
    submit(stream, ring, 4)
    until(lambda: script.calls["send"] == 4)
    assert (stream.pending, ring.has_room) == (4, False)
    script.taking.set()
    until(lambda: stream.pending == 0)
    assert [ring.acquire(wait_s=20.0) is not None for _ in range(4)] == [True] * 4


def test_the_reason_is_kept_while_the_log_takes_nothing(
    script: Script, ring: FrameRing, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 6):
        script.fail_at("open", number)
    stream = Publisher(script.open, ring)
    until(lambda: stream.failure is not None)
    assert stream.failure is not None
    submit(stream, ring, 2)
    until(lambda: stream.pending == 0)
    until(lambda: stream.failure is None)
    assert stream.close(WAIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "kept and will be sent again" in text]) == 1
    assert said[-1] == "the log accepts frames again"


def test_each_reason_of_an_outage_is_logged_once(
    script: Script, ring: FrameRing, caplog: pytest.LogCaptureFixture
) -> None:
    for call, number in itertools.product(("open", "send"), (1, 2)):
        script.fail_at(call, number)
    stream = Publisher(script.open, ring)
    submit(stream, ring, 2)
    until(lambda: stream.pending == 0)
    assert stream.close(WAIT_S)
    said = [record.getMessage() for record in caplog.records]
    reasons = [text.rpartition(": ")[2] for text in said if "kept and will be sent again" in text]
    assert reasons == ["open 1 fails by script", "send 1 fails by script"]


def test_a_log_that_says_nothing_is_named_as_one_that_takes_nothing(
    script: Script, ring: FrameRing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher, "_SILENT_S", 0.05)
    stream = Publisher(script.open, ring)
    script.taking.clear()
    submit(stream, ring, 2)
    until(lambda: stream.failure is not None)
    assert "waiting for broker 7" in str(stream.failure)
    script.taking.set()
    until(lambda: stream.pending == 0)
    until(lambda: stream.failure is None)
    time.sleep(0.1)
    assert stream.failure is None, "a log that was given nothing owes no answer"
    assert stream.close(WAIT_S)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "kept and will be sent again" in text]) == 1


def test_a_writer_that_hears_nothing_is_given_up_and_its_frames_are_sent_again(
    script: Script, ring: FrameRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_DEAF_S", 0.05)
    stream = Publisher(script.open, ring)
    script.taking.clear()
    submit(stream, ring, 2)
    until(lambda: script.closed > 0)
    script.taking.set()
    until(lambda: stream.pending == 0)
    assert stream.close(WAIT_S)
    assert script.seqs == [0, 1]


def test_wait_mark_tells_where_exactly_that_mark_ends(script: Script, stream: Publisher, ring: FrameRing) -> None:
    submit(stream, ring, 2)
    (first,) = submit(stream, ring, 1, Kind.MARK)
    submit(stream, ring, 2)
    (second,) = submit(stream, ring, 1, Kind.MARK)
    ends = {seq: stream.wait_mark(seq, WAIT_S) for seq in (first, second)}
    by_seq = {parse_header(frame).seq: parse_header(frame) for frame in script.durable}
    assert ends == {seq: StreamEnd(seq + 1, 0, 1000 * (seq + 1), by_seq[seq].header_crc) for seq in (first, second)}


def test_wait_mark_lets_go_of_the_marks_up_to_the_one_it_tells(
    script: Script, stream: Publisher, ring: FrameRing
) -> None:
    first, second, third = submit(stream, ring, 3, Kind.MARK)
    until(lambda: stream.pending == 0)
    assert stream.wait_mark(second, WAIT_S) is not None
    assert stream.wait_mark(first, 0.01) is None
    assert stream.wait_mark(second, 0.01) is None
    assert stream.wait_mark(third, 0.01) is not None


def test_wait_mark_gives_up_when_its_time_is_over(script: Script, stream: Publisher, ring: FrameRing) -> None:
    script.taking.clear()
    (seq,) = submit(stream, ring, 1, Kind.MARK)
    assert stream.wait_mark(seq, 0.01) is None
    script.taking.set()
    assert stream.wait_mark(seq, WAIT_S) is not None


def test_wait_mark_survives_a_writer_that_fails(script: Script, stream: Publisher, ring: FrameRing) -> None:
    script.lost_acks = 2
    submit(stream, ring, 3)
    (seq,) = submit(stream, ring, 1, Kind.MARK)
    end = stream.wait_mark(seq, WAIT_S)
    assert end is not None
    assert (end.frames, end.end) == (4, 4000)


def test_a_log_that_takes_a_frame_before_its_acknowledged_end_has_lost_the_stream(
    script: Script, stream: Publisher, ring: FrameRing
) -> None:
    submit(stream, ring, 3)
    until(lambda: stream.pending == 0)
    script.jump = -2000
    (seq,) = submit(stream, ring, 1, Kind.MARK)
    with pytest.raises(StreamLostError, match="up to offset 3000, but put the next one at 1000: its tail was lost"):
        stream.wait_mark(seq, WAIT_S)
    # Nothing is sent any more, and nobody waits: what is submitted is dropped, and the ring stays free.
    sent = len(script.durable)
    submit(stream, ring, 50)
    assert len(script.durable) == sent
    lost = stream.lost
    assert lost is not None
    stream.discard(lost, WAIT_S)
    assert [ring.acquire() is not None for _ in range(4)] == [True] * 4


def test_a_stream_that_is_discarded_gives_back_what_was_not_acknowledged(
    script: Script, stream: Publisher, ring: FrameRing
) -> None:
    script.taking.clear()
    (seq,) = submit(stream, ring, 1, Kind.MARK)
    submit(stream, ring, 3)
    stream.discard(StreamLostError("another rank's stream was lost"), WAIT_S)
    with pytest.raises(StreamLostError, match="another rank's"):
        stream.wait_mark(seq, WAIT_S)
    assert [ring.acquire() is not None for _ in range(4)] == [True] * 4


def test_what_lies_between_two_frames_is_to_be_looked_at(script: Script, stream: Publisher, ring: FrameRing) -> None:
    submit(stream, ring, 2)
    until(lambda: stream.pending == 0)
    script.jump = 5
    submit(stream, ring, 1)
    until(lambda: stream.pending == 0)
    (gap,) = stream.flight.gaps
    assert (gap.begin, gap.end, gap.seq) == (2000, 2005, 2)
    assert gap.sent == (parse_header(script.durable[2]).header_crc,)
    stream.flight.looked_at([gap])
    assert stream.flight.gaps == ()


def test_submitting_never_waits_for_the_log(script: Script, stream: Publisher, ring: FrameRing) -> None:
    script.taking.clear()
    submit(stream, ring, 4)  # would never return
    assert stream.pending == 4


def test_payloads_are_waited_for_in_front_of_their_checksum(script: Script, stream: Publisher, ring: FrameRing) -> None:
    buffer = ring.acquire()
    assert buffer is not None
    buffer.put_json(Header(Kind.ROWS, JOB, 1), b"early")
    buffer.ready = lambda: buffer.put_json(buffer.header, b"late!") if buffer.header else None
    stream.submit(buffer)
    until(lambda: stream.pending == 0)
    (frame,) = script.durable
    assert bytes(payload_of(parse_header(frame), frame)).startswith(b"late!")


def test_close_sends_what_is_queued(script: Script, ring: FrameRing) -> None:
    stream = Publisher(script.open, ring)
    submit(stream, ring, 10)
    assert stream.close(WAIT_S)
    assert len(script.durable) == 10
    assert script.closed == 1


def test_close_is_bounded_when_the_log_takes_nothing(script: Script, ring: FrameRing) -> None:
    script.taking.clear()
    stream = Publisher(script.open, ring)
    submit(stream, ring, 2)
    assert not stream.close(0.05)  # the log never takes them
    assert stream.pending == 2
    until_ended(stream)


def test_close_is_bounded_while_a_writer_cannot_be_opened(
    script: Script, ring: FrameRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "_BACKOFF_S", (3600.0, 3600.0))
    script.fail_at("open", 1)
    stream = Publisher(script.open, ring)
    submit(stream, ring, 1)
    until(lambda: stream.failure is not None)
    assert not stream.close(0.05)
    until_ended(stream)


def test_a_closed_stream_takes_no_frame(script: Script, ring: FrameRing) -> None:
    stream = Publisher(script.open, ring)
    assert stream.close(WAIT_S)
    with pytest.raises(LogUnavailableError, match="the stream is closed"):
        submit(stream, ring, 1)
    with pytest.raises(LogUnavailableError, match="the stream is closed"):
        stream.wait_mark(0, WAIT_S)


def test_a_bug_in_the_publisher_thread_reaches_whoever_waits(
    script: Script, stream: Publisher, ring: FrameRing
) -> None:
    buffer = ring.acquire()
    assert buffer is not None
    buffer.put_json(Header(Kind.MARK, JOB, 1), b"{}")

    def broken() -> None:
        raise ZeroDivisionError("scripted")

    buffer.ready = broken
    seq = stream.submit(buffer)
    with pytest.raises(RuntimeError, match="the publisher thread has died") as died:
        stream.wait_mark(seq, WAIT_S)
    assert isinstance(died.value.__cause__, ZeroDivisionError)
