"""Power loss: everything that a disk may hold at any moment of a small file log, rebuilt and read.

A job of one rank runs with the calls that order a disk's content under a recorder: fsync, fdatasync, rename, link,
unlink, mkdir and ftruncate. Before and after each of them the recorder notes, for every name, what a machine that
loses power may keep of it. A file has its synced content, or all of it, or half of what was not synced, or zeros in
its place. A name that was made, moved or taken away counts as durable once its folder has been synced, and may or may
not be there before.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tests import ranks
from tests.faults.board import Row
from tests.faults.subject import Form
from tests.faults.surgery import restore_from
from tests.jobs import attach
from tests.model import PLAN_1, trainer, truth
from tests.parts import DenseFolder, FileLog
from torchrec_stream_ckpt import MarkerId, StreamCkptError, StreamConfig
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.verify.verify import verify_marker

MOST = 256
"""Above this many combinations at one moment, a drawn part of them is looked at."""
STEPS, EVERY = 7, 2


@dataclass
class Moment:
    """What may be left of each name if the power goes now."""

    call: str
    reported: list[str]
    """Markers whose futures have resolved."""
    folders: dict[str, bool] = field(default_factory=dict)
    """Folder -> whether its name is durable."""
    options: dict[str, list[str | None]] = field(default_factory=dict)
    """File -> what it may hold, as keys of blobs; None: it is not there."""


class Recorder:
    """Watches one folder from inside the process that writes it."""

    def __init__(self, base: Path) -> None:
        self._base = str(base)
        self.moments: list[Moment] = []
        self.blobs: dict[str, bytes] = {}
        self.reported: list[str] = []
        self._synced: dict[int, bytes] = {}
        """inode -> content that is durable."""
        self._names: dict[str, dict[str, int]] = {self._base: {}}
        """Folder -> its durable names and their inodes."""
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        patched = {
            name: getattr(os, name)
            for name in ("fsync", "fdatasync", "rename", "replace", "link", "unlink", "mkdir", "ftruncate")
        }
        for name, real in patched.items():
            setattr(os, name, self._watched(name, real))
        try:
            yield
        finally:
            for name, real in patched.items():
                setattr(os, name, real)

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            place = args[0] if not isinstance(args[0], int) else os.readlink(f"/proc/self/fd/{args[0]}")
            if not os.fspath(place).startswith(self._base + "/") and os.fspath(place) != self._base:
                return real(*args, **kwargs)
            with self._lock:
                self._note(f"before {name}")
                result = real(*args, **kwargs)
                if name in ("fsync", "fdatasync"):
                    self._make_durable(args[0], str(place))
                self._note(f"after {name}")
            return result

        return call

    def _make_durable(self, fd: int, path: str) -> None:
        if os.path.isdir(path):
            self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
        else:
            self._synced[os.fstat(fd).st_ino] = Path(path).read_bytes()

    def _note(self, call: str) -> None:
        moment = Moment(call, list(self.reported))
        self._walk(self._base, moment)
        same = self.moments and (self.moments[-1].options, self.moments[-1].folders) == (
            moment.options,
            moment.folders,
        )
        if same and self.moments[-1].reported == moment.reported:
            return
        self.moments.append(moment)

    def _walk(self, folder: str, moment: Moment) -> None:
        durable = self._names.get(folder, {})
        seen = set()
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            seen.add(entry.name)
            name = os.path.relpath(entry.path, self._base)
            if entry.is_dir():
                moment.folders[name] = entry.name in durable
                self._walk(entry.path, moment)
            else:
                moment.options[name] = self._contents(entry, durable.get(entry.name))
        for gone in durable.keys() - seen:  # unlinked or moved away, and its folder was not synced since
            name = os.path.relpath(os.path.join(folder, gone), self._base)
            moment.options[name] = [None, self._blob(self._synced.get(durable[gone], b""))]

    def _contents(self, entry: os.DirEntry[str], durable_inode: int | None) -> list[str | None]:
        now, inode = Path(entry.path).read_bytes(), entry.inode()
        kept = self._synced.get(inode, b"")
        contents = [now, kept]
        if now.startswith(kept) and len(now) > len(kept):
            rest = len(now) - len(kept)
            contents += [now[: len(kept) + rest // 2], kept + bytes(rest)]
        options: list[str | None] = list(dict.fromkeys(map(self._blob, contents)))
        if durable_inode is None:
            options.append(None)
        elif durable_inode != inode:
            options.append(self._blob(self._synced.get(durable_inode, b"")))
        return options

    def _blob(self, content: bytes) -> str:
        key = hashlib.sha1(content).hexdigest()
        self.blobs[key] = content
        return key


def record(uri: str, base: Path, truths: Path, output: Path) -> None:
    """(one rank) Two generations of a small job, recorded into ``output``."""
    recorder = Recorder(base)
    with recorder.watching():
        for _ in range(2):
            job = trainer(PLAN_1)
            checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None, sweep_bytes=2**20))
            checkpointer.restore()
            folder = truths / str(checkpointer.generation)
            folder.mkdir(parents=True)
            for _ in range(STEPS):
                job.step()
                checkpointer.step()
                if job.step_number % EVERY == 0:
                    torch.save(truth(job), folder / f"{job.step_number}.pt")
                    recorder.reported.append(str(checkpointer.mark().result(60).id))
            checkpointer.close()
    output.write_bytes(pickle.dumps((recorder.moments, recorder.blobs)))


def power_loss(form: Form) -> None:
    """Every moment of a recorded file log, and everything that the disk may hold then."""
    directory = form.folder("power")
    base, truths = directory / "disk", directory / "truths"
    base.mkdir()
    ranks.run(1, record, f"file://{base / 'log'}", base, truths, directory / "recording")
    moments, blobs = pickle.loads((directory / "recording").read_bytes())
    row = form.board.row("power loss: unsynced writes and names lost, kept or torn, files")
    draw, kept, calls = form.draw("power"), [], set()
    known: dict[str, Verdict] = {}
    most, drawn = MOST if form.full else 24, 0
    for moment in moments:
        row.injected += 1
        looked_at = 0
        drawn += _combinations(list(moment.options.values())) > most
        for state in _states(moment, draw, most):
            looked_at += 1
            key = hashlib.sha1(repr(sorted(state.items())).encode()).hexdigest()
            if key not in known:
                disk = directory / f"state-{len(known)}"
                known[key] = _examine(disk, state, blobs)
                if known[key].whole and (form.full or len(known) % 40 == 0):
                    kept.append((disk, known[key].whole))
                else:
                    shutil.rmtree(disk)
            _judge(row, moment, known[key])
        row.fired += looked_at > 0
        calls.add(moment.call.split()[-1])
    _restore_some(row, truths, draw.sample(kept, min(len(kept), 24 if form.full else 4)))
    row.remark = (
        f"{len(known)} different states of the disk at {len(moments)} moments around {', '.join(sorted(calls))}; "
        f"all combinations at {len(moments) - drawn} of them"
    )
    assert {"fsync", "fdatasync", "rename", "link", "mkdir"} <= calls


def _states(moment: Moment, draw: Any, most: int) -> Iterator[dict[str, str]]:
    """Disk contents {file: blob}; a folder whose name is not durable may be gone with all that is in it."""
    volatile = [name for name, durable in moment.folders.items() if not durable]
    for lost in [(), *[(name,) for name in volatile]]:
        names = [name for name in moment.options if not any(name.startswith(f"{folder}/") for folder in lost)]
        choices = [moment.options[name] for name in names]
        if _combinations(choices) <= most:
            picks: Any = itertools.product(*choices)
        else:
            # Both ends, each name alone against either end, and what is drawn.
            ends = [[options[0] for options in choices], [options[-1] for options in choices]]
            alone = [
                [option if position == other else end[other] for other in range(len(choices))]
                for end in ends
                for position, options in enumerate(choices)
                for option in options
            ]
            drawn = [[draw.choice(options) for options in choices] for _ in range(most)]
            picks = [*ends, *alone, *drawn] if most == MOST else [*ends, *draw.sample(alone, most), *drawn[: most // 2]]
        for pick in picks:
            yield {name: option for name, option in zip(names, pick, strict=True) if option is not None}


def _combinations(choices: list[list[str | None]]) -> int:
    return math.prod(map(len, choices))


@dataclass
class Verdict:
    """What a reader finds on one disk."""

    whole: set[str]
    broken: dict[str, str]
    """Markers that are offered and are not whole; '' for the log itself."""


def _examine(disk: Path, state: dict[str, str], blobs: dict[str, bytes]) -> Verdict:
    """Build it, read every marker that it offers, then let another trainer claim it."""
    for name, blob in state.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_bytes(blobs[blob])
    (disk / "log").mkdir(parents=True, exist_ok=True)
    verdict, log = Verdict(set(), {}), FileLog(disk / "log")
    try:
        control = Control(log)
        lineage = control.refresh()
        for marker in lineage.commits:
            try:
                verify_marker(log, lineage, DenseFolder(disk / "log"), marker)
                verdict.whole.add(str(marker))
            except StreamCkptError as error:
                verdict.broken[str(marker)] = str(error)
        if lineage.claims:
            last: Claim = lineage.claims[lineage.newest_generation]
            control.claim(replace(last, generation=last.generation + 1, nonce="after the power loss"))
            assert control.refresh().commits.keys() == lineage.commits.keys()
    except StreamCkptError as error:
        verdict.broken[""] = str(error)
    return verdict


def _judge(row: Row, moment: Moment, verdict: Verdict) -> None:
    """Reported markers are there; whatever else is offered is whole."""
    for marker in moment.reported:
        if marker in verdict.whole:
            row.compared += 1
        else:
            row.lose(f"{marker} at '{moment.call}': {verdict.broken.get(marker, verdict.broken.get('', 'not there'))}")
    for marker, said in verdict.broken.items():
        if marker not in moment.reported:
            row.err(f"{marker or 'the log'} at '{moment.call}': {said}")


def _restore_some(row: Row, truths: Path, kept: list[tuple[Path, set[str]]]) -> None:
    """Into a live model, on two ranks, bit for bit."""
    tasks = [(StreamConfig(uri=f"file://{disk / 'log'}"), [max(whole, key=MarkerId.parse)]) for disk, whole in kept]
    for verdict in ranks.run(2, restore_from, truths, tasks)[0] if tasks else []:
        if verdict == "exact":
            row.compared += 1
        else:
            row.err(verdict)
