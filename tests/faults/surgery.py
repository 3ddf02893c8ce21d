"""Logs and stores that somebody has tampered with: what is whole comes back exactly, the rest is refused by name."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests import ranks
from tests.faults.board import Row
from tests.faults.live import restore_each
from tests.faults.subject import Form, Subject, file_job, kafka_job, opened
from tests.model import PLAN_2, PLAN_3, Spec
from tests.parts import Ack, open_log
from torchrec_stream_ckpt import MarkerId, StreamConfig
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.util.types import LogSpan
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

Item = tuple[int, bytes]
"""A frame and the seq that it had in the whole stream."""
Streams = dict[tuple[int, int], list[Item]]
"""By (generation, rank)."""
Control = list[Claim | Commit]


@dataclass(frozen=True)
class Place:
    """Where the knife is put: a frame of one stream, between two markers of its generation."""

    generation: int
    rank: int
    seq: int


Cut = Callable[[Streams, Place], None]


def duplicated(streams: Streams, place: Place) -> None:
    items = streams[place.generation, place.rank]
    items.insert(place.seq + 1, items[place.seq])


def sent_again(streams: Streams, place: Place) -> None:
    """As a producer does that lost its acknowledgements."""
    items = streams[place.generation, place.rank]
    items[place.seq + 1 : place.seq + 1] = items[place.seq - 2 : place.seq + 1]


def reordered(streams: Streams, place: Place) -> None:
    items = streams[place.generation, place.rank]
    items[place.seq - 1], items[place.seq] = items[place.seq], items[place.seq - 1]


def dropped(streams: Streams, place: Place) -> None:
    del streams[place.generation, place.rank][place.seq]


def replayed(streams: Streams, place: Place) -> None:
    """The frame before stands in its place."""
    items = streams[place.generation, place.rank]
    items[place.seq] = (place.seq, items[place.seq - 1][1])


def swapped_with_another_rank(streams: Streams, place: Place) -> None:
    one, other = streams[place.generation, place.rank], streams[place.generation, 1 - place.rank]
    there = min(place.seq, len(other) - 1)
    mine, theirs = one[place.seq][1], other[there][1]
    one[place.seq], other[there] = (place.seq, theirs), (there, mine)


def swapped_with_another_generation(streams: Streams, place: Place) -> None:
    foreign = streams[3 - place.generation, place.rank]
    streams[place.generation, place.rank][place.seq] = (place.seq, foreign[min(place.seq, len(foreign) - 1)][1])


HARMLESS: tuple[Cut, ...] = (duplicated, sent_again)
CUTS: tuple[Cut, ...] = (
    *HARMLESS,
    reordered,
    dropped,
    replayed,
    swapped_with_another_rank,
    swapped_with_another_generation,
)


@dataclass
class Case:
    """One tampered log, and which markers must still come back from it."""

    row: Row
    settings: StreamConfig
    exact: set[MarkerId]
    refused: set[MarkerId]


def frames_on_files(form: Form) -> None:
    """Frames of a copied file log change their places."""
    subject = file_job(form, "surgery")
    subject.settings.store = f"file://{subject.directory / 'store'}"
    _operate(form, subject, "files", CUTS, lambda name: f"file://{subject.directory / name}")


def frames_on_kafka(form: Form) -> None:
    """The same, rewritten into other topics."""
    subject = kafka_job(form, "surgery")
    cuts = CUTS if form.full else (sent_again, dropped)
    _operate(form, subject, "kafka", cuts, lambda name: f"{subject.settings.uri}-{name}")


def _operate(form: Form, subject: Subject, where: str, cuts: tuple[Cut, ...], uri: Callable[[str], str]) -> None:
    lineage, draw = two_generations(form, subject), form.draw("surgery")
    cases = []
    for number in range(3 if form.full else 1):
        for cut in cuts:
            row = form.board.row(f"frames {cut.__name__.replace('_', ' ')}, {where}")
            row.injected += 1
            place = _place(lineage, draw, number)
            harmed = set() if cut in HARMLESS else _later(lineage, place, cut)
            target = replace(subject.settings, uri=uri(f"{cut.__name__}-{number}"))
            before, after = rebuild(subject.settings, target, lambda streams, c=cut, p=place: c(streams, p))
            row.fired += before != after
            cases.append(Case(row, target, lineage.commits.keys() - harmed, harmed))
    restore_cases(form, subject, cases)


def two_generations(
    form: Form, subject: Subject, teams: Sequence[tuple[int, Spec]] = ((2, PLAN_2), (3, PLAN_3))
) -> Lineage:
    """A log with two markers and more in each of two generations, the second on the newest of the first."""
    row = form.board.row("logs that are tampered with below, unchanged")
    for team in teams:
        row.injected += 1
        with subject.living(row, team=team) as incarnation:
            incarnation.await_reports(2)
            row.fired += 1
    return subject.lineage()


def _place(lineage: Lineage, draw: random.Random, number: int) -> Place:
    """A frame between the first and the last marker of a generation, at least two frames after the first."""
    generation, rank = (1, 2)[number % 2], draw.randrange(2)
    ends = [commit.ranks[rank].frames for id_, commit in lineage.commits.items() if id_.generation == generation]
    return Place(generation, rank, draw.randrange(min(ends) + 1, max(ends) - 1))


def _later(lineage: Lineage, place: Place, cut: Cut) -> set[MarkerId]:
    """Markers that read a stream beyond what was changed in it."""
    changed = {place.rank: place.seq - 1 if cut is reordered else place.seq}
    if cut is swapped_with_another_rank:
        other = 1 - place.rank
        frames = [commit.ranks[other].frames for id_, commit in lineage.commits.items() if _of(id_, place)]
        changed[other] = min(place.seq, max(frames) - 1)
    return {
        marker
        for marker in lineage.commits
        for commit in lineage.path(marker)
        if _of(commit.id, place) and any(commit.ranks[rank].frames > seq for rank, seq in changed.items())
    }


def _of(marker: MarkerId, place: Place) -> bool:
    return marker.generation == place.generation


def rebuild(source: StreamConfig, target: StreamConfig, operate: Callable[[Streams], None]) -> tuple[Streams, Streams]:
    """Write a log anew, operated on, with a control partition that fits it; the streams before and after."""
    with opened(source) as old, opened(target) as new:
        records = [parse_control(record) for _, record in old.read_control()]
        lineage = Lineage.of(records)
        streams = _read_streams(old, lineage)
        before = {key: list(items) for key, items in streams.items()}
        operate(streams)
        new.prepare(max(claim.world for claim in lineage.claims.values()))
        acks = {key: _write_stream(new, lineage, key, items) for key, items in streams.items()}
        incarnation = new.incarnation()
        assert incarnation is not None
        parsed = parse_uri(target.uri)
        for record in records:
            if isinstance(record, Claim):
                name = parsed.job if isinstance(parsed, KafkaUri) else ""
                new.append_control(replace(record, incarnation=incarnation.id, name=name).to_frame())
            else:
                new.append_control(_moved(record, streams, acks).to_frame())
        return before, streams


def _read_streams(log: Log, lineage: Lineage) -> Streams:
    """All frames that some marker needs."""
    newest = {commit.id.generation: commit for commit in lineage.commits.values()}
    streams: Streams = {}
    for generation, commit in newest.items():
        for end in commit.ranks:
            items = streams.setdefault((generation, end.rank), [])
            for _, frame in log.read(LogSpan(generation, end.partition, end.begin, end.end)):
                header = parse_header(frame)
                if (header.generation, header.rank) == (generation, end.rank) and header.seq == len(items):
                    items.append((header.seq, bytes(frame)))
    return streams


def _write_stream(log: Log, lineage: Lineage, key: tuple[int, int], items: list[Item]) -> list[Ack]:
    generation, rank = key
    writer = log.open_writer(generation, rank % lineage.claims[generation].partitions, 0)
    acks: list[Ack] = []
    for _, frame in items:
        writer.send(memoryview(frame))
    deadline = time.monotonic() + 60
    while len(acks) < len(items):
        assert time.monotonic() < deadline, "the rebuilt log does not take its frames"
        acks += writer.poll(0.2)
    writer.close()
    return acks


def _moved(commit: Commit, streams: Streams, acks: dict[tuple[int, int], list[Ack]]) -> Commit:
    """The COMMIT, with the ends at which its frames stand now."""
    ends = []
    for end in commit.ranks:
        key = (commit.generation, end.rank)
        last = max(position for position, (seq, _) in enumerate(streams[key]) if seq < end.frames)
        ends.append(replace(end, begin=acks[key][0].offset, end=acks[key][last].end))
    return replace(commit, ranks=tuple(ends))


REFUSALS = ("CorruptionError", "OtherLogError", "MissingObjectError", "StreamLostError", "MarkerNotFoundError")
"""Damage, whatever kind of it, and a marker that nothing speaks of any more."""


def restore_cases(form: Form, subject: Subject, cases: list[Case]) -> None:
    """Restore every marker of every case, in the short form the newest of either kind, and judge what came of it."""
    markers = [
        (case, marker)
        for case in cases
        for kind in (case.exact, case.refused)
        for marker in sorted(kind)[0 if form.full else -1 :]
    ]
    tasks = [(case.settings, [str(marker)]) for case, marker in markers]
    said = ranks.run(2, restore_from, subject.truths, tasks, timeout_s=90 + 5.0 * len(tasks))[0]
    for (case, marker), verdict in zip(markers, said, strict=True):
        if verdict == "exact" and marker in case.exact:
            case.row.compared += 1
        elif verdict.startswith(REFUSALS) and marker in case.refused:
            case.row.refused += 1
        elif marker in case.exact and not verdict.startswith("wrong"):
            case.row.lose(f"{marker}: {verdict}")
        else:
            case.row.err(f"{marker}: {verdict}")


def restore_from(truths: Path, tasks: list[tuple[StreamConfig, list[str]]]) -> list[str]:
    """(each rank) One verdict for each marker of each task."""
    return [verdict for settings, markers in tasks for verdict in restore_each(settings, truths, markers)]


# The control log, segments and dense state of a file log.


def files_tampered_with(form: Form) -> None:
    """Control records, segments and dense directories that are missing, torn, twice there, or late."""
    subject, draw = file_job(form, "tampered"), form.draw("tampered")
    lineage = two_generations(form, subject)
    cases, newest = [], max(lineage.commits)
    children = {marker for marker in lineage.commits if marker.generation == 2}
    parent = lineage.claims[2].parent
    assert parent is not None
    everything = set(lineage.commits)

    def case(name: str, refused: set[MarkerId], harm: Callable[[Path], Any]) -> None:
        row = form.board.row(f"{name}, files")
        row.injected += 1
        copy = subject.directory / f"copy-{len(cases)}"
        shutil.copytree(subject.directory / "log", copy)
        before = _content(copy)
        harm(copy)
        row.fired += _content(copy) != before
        cases.append(Case(row, replace(subject.settings, uri=f"file://{copy}"), everything - refused, refused))

    def control(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], Any]:
        def harm(copy: Path) -> None:
            (copy / "control.log").write_bytes(b"".join(change(_records(copy))))
            shutil.rmtree(copy / "records")  # which would tell

        return harm

    is_claim = [isinstance(record, Claim) for record in map(parse_control, _records(subject.directory / "log"))]
    second = len(is_claim) - 1 - is_claim[::-1].index(True)
    case(
        "control records duplicated", set(), control(lambda all_: [record for each in all_ for record in (each, each)])
    )
    case("COMMIT of the newest marker dropped", {newest}, control(lambda all_: all_[:-1]))
    case("torn tail of the control log", {newest}, control(lambda all_: [*all_[:-1], all_[-1][:-7]]))
    case(
        "COMMIT late, after the next CLAIM",
        {parent} | children,
        control(lambda all_: [*all_[: second - 1], all_[second], all_[second - 1], *all_[second + 1 :]]),
    )
    case("segment of one rank missing", children, lambda copy: next(copy.glob("data/p00002/g00000002-*")).unlink())
    case(
        "retention deleted the first generation", everything, lambda copy: _unlink_all(copy.glob("data/*/g00000001-*"))
    )
    for kind in ("missing", "torn", "emptied", "without its metadata"):
        for _ in range(3 if form.full else 1):
            case(f"dense state {kind}", {newest}, lambda copy, k=kind: harm_dense(copy, newest, k, draw))
    restore_cases(form, subject, cases)
    _fall_back(form, subject, [each for each in cases if each.row.fault.startswith("dense")], newest)


def _fall_back(form: Form, subject: Subject, cases: list[Case], newest: MarkerId) -> None:
    """Without a name, the newest marker that is whole comes back."""
    before = max(marker for marker in subject.lineage().commits if marker < newest)
    said = ranks.run(2, restore_from, subject.truths, [(case.settings, [""]) for case in cases])[0]
    for case, verdict in zip(cases, said, strict=True):
        if verdict == f"exact {before}":
            case.row.compared += 1
        else:
            case.row.err(f"falling back: {verdict}")


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _records(folder: Path) -> list[bytes]:
    return [record for _, record in open_log(f"file://{folder}").read_control()]


def _unlink_all(paths: Iterator[Path]) -> None:
    for path in list(paths):
        path.unlink()


def harm_dense(copy: Path, marker: MarkerId, kind: str, draw: random.Random) -> None:
    (folder,) = copy.glob(f"dense/*/g{marker.generation:08d}-m{marker.marker:08d}")
    victim = draw.choice(sorted(folder.glob("__*")))
    if kind == "missing":
        shutil.rmtree(folder)
    elif kind == "without its metadata":
        (folder / ".metadata").unlink()
    else:
        size = victim.stat().st_size
        with open(victim, "r+b") as file:
            file.truncate(0 if kind == "emptied" else draw.randrange(1, size))
