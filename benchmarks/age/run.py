"""What age costs: attach, choice, commit, memory and ``list`` on a log of many generations and on a young one.

python benchmarks/age/run.py [--generations 1000] [--markers 50000] [--ranks 64] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from common import Goal, Measured, Report, arguments, at_least, parse, refuse_small_machine, scratch, tell  # noqa: E402

from tests.builders import digest_files  # noqa: E402
from torchrec_stream_ckpt.find.find import Search  # noqa: E402
from torchrec_stream_ckpt.find.job import Job  # noqa: E402
from torchrec_stream_ckpt.find.tiers import TierState  # noqa: E402
from torchrec_stream_ckpt.format.claim_references import brief  # noqa: E402
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark  # noqa: E402
from torchrec_stream_ckpt.format.dense import dense_path  # noqa: E402
from torchrec_stream_ckpt.format.dense_files import DenseFile, listed  # noqa: E402
from torchrec_stream_ckpt.format.frame import Header, Kind, json_frame  # noqa: E402
from torchrec_stream_ckpt.format.rank_shards import RankShards  # noqa: E402
from torchrec_stream_ckpt.format.schema import Schema  # noqa: E402
from torchrec_stream_ckpt.log.control.ancestor_check import Older  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.save.generation import check_claimed  # noqa: E402
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, partition_dir, segment_name  # noqa: E402
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard, TableSpec  # noqa: E402

JOB = bytes(range(16))
TIMEOUT_S = 60.0
NEWEST = 20
WIDE = 1024


@dataclass(frozen=True)
class Age:
    """How old a log is."""

    generations: int
    each: int
    """Markers of each generation, which stands on the newest one of the generation before."""
    ranks: int

    @property
    def markers(self) -> int:
        return self.generations * self.each


class Writer:
    """Writes a log as trainers leave it, with the library's own encoders, and nothing of it synced."""

    def __init__(self, root: Path, age: Age) -> None:
        self._root, self._age = root, age
        state = StateSpec("momentum1", "float32", True)
        bare = Schema((TableSpec("t", age.ranks * 64, 16, "float32", "exact_rowwise_adagrad", (state,)),))
        self.schema = bare.named(None, JOB, 1)
        self.incarnation = FileLog(root).prepare(age.ranks).id
        self._shards = [(TableShard(0, 64 * rank, 64, 0, 16),) for rank in range(age.ranks)]
        self._layout = RankShards.of(self._shards)

    def write(self) -> None:
        """All generations."""
        parent, claims = None, dict[int, Claim]()
        with open(self._root / CONTROL_FILE, "ab") as control:
            for number in range(1, self._age.generations + 1):
                claims[number] = brief(self.claim(number, parent), claims)
                control.write(claims[number].to_frame())
                for commit in self._commits(number):
                    control.write(commit.to_frame())
                    parent = commit.id

    def claim(self, number: int, parent: MarkerId | None) -> Claim:
        swept = () if parent else (0,)
        ranks = self._age.ranks
        said = (JOB, number, f"{number:032x}", "", parent, ranks, ranks, self.incarnation, self.schema, swept)
        return Claim(*said, time.time(), layout=self._layout)

    def _commits(self, number: int) -> list[Commit]:
        ends = [self._stream(number, rank) for rank in range(self._age.ranks)]
        return [
            self.commit(number, marker, [end[marker - 1] for end in ends]) for marker in range(1, self._age.each + 1)
        ]

    def _stream(self, number: int, rank: int) -> list[RankEnd]:
        """The stream of one rank: its HELLO, and a MARK for each marker. Returns where it stands at each."""
        hello = Hello(self._age.ranks, self.schema, self._shards[rank])
        header = Header(Kind.HELLO, JOB, number, rank, schema_crc=self.schema.crc)
        data, ends = io.BytesIO(json_frame(header, hello.to_json())), []
        data.seek(0, io.SEEK_END)
        text = Mark(0, 0, ()).to_json()
        for marker in range(1, self._age.each + 1):
            sent, chain = data.tell(), header.header_crc
            header = Header(
                Kind.MARK, JOB, number, rank, marker, 10 * marker, marker, schema_crc=self.schema.crc, chain=chain
            )
            data.write(json_frame(header, text))
            ends.append(RankEnd(rank, rank, 0, data.tell(), marker + 1, header.header_crc, 0, sent))
        (partition_dir(self._root, rank) / segment_name(number, 0)).write_bytes(data.getvalue())
        return ends

    def commit(self, number: int, marker: int, ends: list[RankEnd]) -> Commit:
        """A marker with a dense directory of one file."""
        bare = Commit(JOB, number, f"{number:032x}", marker, 10 * marker, tuple(ends), "", (), time.time(), "")
        folder = dense_path(self._root, bare)
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"")
        files = digest_files(folder, [".metadata"])
        return replace(bare, dense=str(folder.relative_to(self._root)), dense_files=files)


def write(root: Path, age: Age) -> None:
    tell(f"writing {age}: {_timed(Writer(root, age).write):.0f} s")


def attach(root: Path) -> dict[str, float]:
    """What rank 0 does at a start: read the control log, choose a marker, open a generation, commit its markers."""
    before = _rss()
    log = FileLog(root)
    control = Control(log, spare=True)
    times = dict(zip(("attach", "attach, CPU"), _timed_twice(control.refresh), strict=True))
    lineage = control.lineage
    newest = lineage.newest
    assert newest is not None
    writer = Writer(root, Age(lineage.newest_generation, 1, len(newest.ranks)))
    times["rank 0, attached"] = _rss() - before
    state, job = TierState(lineage), Job(uri=str(root), log=log, control=control, store=str(root))
    found = _timed_twice(lambda: Search(state, job).choose(None))
    times |= dict(zip(("choice", "choice, CPU"), found, strict=True))
    claim = brief(writer.claim(lineage.next_generation, newest.id), lineage.claims)
    control.claim(claim)
    ends = [end[-1] for end in (writer._stream(claim.generation, rank) for rank in range(len(newest.ranks)))]
    older, commits = Older(), []
    for marker in range(1, 12):
        commit = replace(writer.commit(claim.generation, marker, ends), nonce=claim.nonce)
        commits.append(_timed(lambda commit=commit: _commit(log, control, claim, commit, older)))
    times["commit"] = sorted(commits[1:])[len(commits) // 2]  # the first one finds out what the generation stands on
    times["first commit"] = commits[0]
    times["rank 0"] = _rss() - before
    return times


def _commit(log: FileLog, control: Control, claim: Claim, commit: Commit, older: Older) -> None:
    check_claimed(log, control, claim, commit.marker, commit.ranks, older)
    control.commit(commit, TIMEOUT_S, threading.Event())


def listing(root: Path, *options: str) -> dict[str, float]:
    """``stream-ckpt list``: seconds, and seconds of CPU."""
    from torchrec_stream_ckpt.cli.main import app

    begin, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        app(["list", f"file://{root}", "--json", *options], standalone_mode=False)
    found = json.loads(said.getvalue())["markers"]
    assert all(row["restorable"] for row in found), "a marker is not restorable"
    return {"wall": time.perf_counter() - begin, "cpu": time.process_time() - cpu, "markers": len(found)}


def wide() -> int:
    """Bytes of a COMMIT of 1,024 ranks: their ends as after a terabyte, a dense file of each."""
    spread = [rank * 2_654_435_761 % 2**32 for rank in range(WIDE)]
    ends = [
        RankEnd(
            rank, rank, 2**33 + each % 2**28, 2**40 + each * 50, 2**20 + each % 2**20, each, each, 2**40 + each * 50
        )
        for rank, each in enumerate(spread)
    ]
    files = [DenseFile(f"__{rank}_0.distcp", each, f"{each:064x}") for rank, each in enumerate(spread)]
    said, _ = listed([DenseFile(".metadata", 2**20, "ab" * 32), *files])
    commit = Commit(JOB, 3, "ab" * 16, 17, 10**6, tuple(ends), f"dense/{JOB.hex()}/g00000003-m00000017", (), 1.8e9, "")
    return len(replace(commit, dense_list=said, store="s3://bucket/prefix", mac="ab" * 32).to_frame())


def _timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _timed_twice(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and seconds of CPU."""
    begin, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin, time.process_time() - cpu


def _rss() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def apart(act: Callable[..., Any], *args: object) -> Any:
    """In a process of its own: this one stays as small as it is, so that each starts with the same memory."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, args)


def _one(value: float, other: float) -> Measured:
    return Measured({"young": [max(value, 1e-9)], "old": [max(other, 1e-9)]})


def measure(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Write both logs, and look at them."""
    old = Age(args.generations, max(1, args.markers // args.generations), args.ranks)
    young = Age(1, min(NEWEST, old.each), args.ranks)
    roots = {"young": folder / "young", "old": folder / "old"}
    for age, root in ((young, roots["young"]), (old, roots["old"])):
        apart(write, root, age)
    report.facts |= {"generations": old.generations, "markers": old.markers, "ranks": old.ranks}
    report.facts["control_log_bytes"] = (roots["old"] / CONTROL_FILE).stat().st_size
    newest = apart(listing, roots["old"], "--newest", str(NEWEST))
    whole = apart(listing, roots["old"])
    times = {name: apart(attach, root) for name, root in roots.items()}
    for what, unit, scale in (
        ("attach", "s", 1),
        ("attach, CPU", "s", 1),
        ("choice", "s", 1),
        ("choice, CPU", "s", 1),
        ("commit", "ms", 1e3),
        ("first commit", "ms", 1e3),
        ("rank 0, attached", "MB", 1e-6),
        ("rank 0", "MB", 1e-6),
    ):
        report.add(what, _one(times["young"][what], times["old"][what]), "young", unit=unit, scale=scale)
    report.facts |= {"list_newest": newest, "list": whole, "commit_bytes_of_1024_ranks": wide()}
    _judge(report, times, newest, whole)


def _judge(
    report: Report, times: dict[str, dict[str, float]], newest: dict[str, float], whole: dict[str, float]
) -> None:
    more = {what: times["old"][what] - times["young"][what] for what in times["old"]}
    report.goals += [
        Goal.at_most("attach, more than a young log's", 1, more["attach"], "s"),
        Goal.at_most("choice, more than a young log's", 1, more["choice"], "s"),
        Goal.at_most("commit, more than a young log's", 5, more["commit"] * 1e3, "ms"),
        Goal.at_most("rank 0, more than at a young log", 50, more["rank 0"] / 1e6, "MB"),
        Goal.at_most(f"list --newest {NEWEST}", 1, newest["wall"], "s"),
        Goal.at_most("list of all, CPU a marker", 0.2, whole["cpu"] / whole["markers"] * 1e3, "ms"),
        Goal.at_most("COMMIT of 1,024 ranks", 40, wide() / 1e3, "KB"),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--generations", type=at_least(1), default=1000)
    parser.add_argument("--markers", type=at_least(1), default=50_000, help="of all generations together")
    parser.add_argument("--ranks", type=at_least(1), default=64)
    args = parse(parser, generations=3, markers=12, ranks=2)
    room = 30_000 * args.markers + 12_000 * args.generations * args.ranks
    refuse_small_machine("age", args, "the log", memory=2 << 30, disk=room)
    report = Report("age", args)
    with scratch("age") as folder:
        measure(report, args, folder)
    report.finish()


if __name__ == "__main__":
    main()
