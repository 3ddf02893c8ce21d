"""A day of an operator: twelve incidents, each with its first message, its page and the command that ends it.

    python scripts/incidents.py [--dir incidents-run] [--away_s 180] [--yes]

It trains on one rank, on a broker of its own, breaks something, shows what an operator would see first, runs the
command of docs/incidents.md, and checks the result: the same rows bit for bit, or the right refusal. It takes about
ten minutes on two cores, three of them for the first incident. Nothing outside of the folder is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

if TYPE_CHECKING:
    from confluent_kafka.admin import AclBinding, AdminClient

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/incidents.md"
MARK = ".incidents"
WAIT_S = 240.0
"""Against a hang alone."""
NO_ANSWER_S = 5.0
"""After this time a marker of the day is given up, and the publisher reports a silent log."""
SMALL_DISK_BYTES = 8 * 2**20
TRAIN = ("--marker_every", "5", "--rest_s", "0.4")


class DayError(Exception):
    """An incident did not go as the page says."""


class Trainer(Protocol):
    """A rank that trains."""

    stdout: TextIO
    """Its output; ends with it."""

    def kill(self) -> None:
        """Send SIGKILL, and return once it is gone."""


class Process:
    """One rank in a separate process."""

    def __init__(self, world: int, script: Path, *arguments: str) -> None:
        words = [sys.executable, str(script), *arguments]
        self._process = subprocess.Popen(
            words,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert world == 1
        assert self._process.stdout is not None
        self.stdout: TextIO = self._process.stdout

    def kill(self) -> None:
        """As :class:`Trainer` says."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Ran:
    """One call of the command line."""

    status: int
    output: str
    """Both streams, errors as the shell shows them."""


def stream_ckpt(arguments: Sequence[str]) -> Ran:
    """Run ``stream-ckpt``."""
    words = [sys.executable, "-m", "torchrec_stream_ckpt", *arguments]
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    return Ran(done.returncode, done.stdout + done.stderr)


class Watched:
    """A trainer whose output is read as it comes.

    Args:
        trainer: The rank.
        file: Gets its output.
    """

    def __init__(self, trainer: Trainer, file: Path) -> None:
        self._trainer, self._file = trainer, file
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._file.open("a") as file, contextlib.suppress(ValueError):  # closed by kill()
            for line in self._trainer.stdout:
                file.write(line)
                with self._changed:
                    self._lines.append(line.rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Number of lines so far; a position for :meth:`line`."""
        return len(self._lines)

    def line(self, pattern: str, since: int = 0) -> str:
        """Wait for a line with ``pattern``; returns it, with the ``Try:`` that follows it.

        Raises:
            DayError: it did not come, or the trainer ended before.
        """
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while True:
                for place in range(since, len(self._lines)):
                    if re.search(pattern, self._lines[place]):
                        self._changed.wait_for(lambda end=place + 1: len(self._lines) > end, 0.5)  # type: ignore[misc]
                        hint = next((each for each in self._lines[place + 1 : place + 2] if "Try: " in each), "")
                        return "\n".join(filter(None, (self._lines[place], hint)))
                since = len(self._lines)
                if not self._reader.is_alive() or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    tail = "\n".join(self._lines[-5:])
                    raise DayError(
                        f"the trainer did not print {pattern!r}; its last lines are in {self._file}:\n{tail}"
                    )

    def marker(self, more: int = 1, since: int | None = None) -> str:
        """Wait for ``more`` committed markers; returns the name of the last one."""
        place, found = self.count if since is None else since, ""
        for _ in range(more):
            line = self.line(r"marker \S+ committed", place)
            found = line.split()[1]
            place = self._place(line.splitlines()[0], place) + 1
        return found

    def _place(self, line: str, since: int) -> int:
        return self._lines.index(line, since)

    def end(self) -> None:
        """Wait until it has ended by itself.

        Raises:
            DayError: it goes on.
        """
        self._reader.join(WAIT_S)
        if self._reader.is_alive():
            raise DayError(f"the trainer does not end, see {self._file}")
        self._trainer.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self._trainer.kill()
        self._reader.join(WAIT_S)


@dataclass(slots=True)
class Record:
    """Messages, commands and checks of one incident."""

    name: str
    seen: list[str] = field(default_factory=list)
    """Messages, the first one first."""
    commands: list[str] = field(default_factory=list)
    """Commands of the operator that were run."""
    checked: list[str] = field(default_factory=list)
    """Effects that were found."""
    not_played: str = ""
    """Why this machine cannot play it."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the day."""

    uri: str
    store: str
    options: tuple[str, ...] = ()
    """Options of the command line for Kafka."""
    outer: str = ""
    """URI of its second tier."""

    @property
    def name(self) -> str:
        """Name of a Kafka job."""
        return self.uri.rpartition("/")[2]

    def flags(self) -> list[str]:
        """Flags of its trainer."""
        tiers = ["--stream_ckpt", self.outer] if self.outer else []
        kafka = [word.replace("-options", "_options") for word in self.options]
        return ["--stream_ckpt", self.uri, *tiers, "--store", self.store, *kafka, *TRAIN]


class Day:
    """The incidents, in the order of the page.

    Args:
        folder: An empty folder; everything is in there.
        away_s: How long the broker is away in the first incident.
        launch: Starts a rank.
        tool: Runs ``stream-ckpt``.
        pause: Called between two incidents.
    """

    def __init__(
        self,
        folder: Path,
        away_s: float = 180.0,
        launch: Callable[..., Trainer] = Process,
        tool: Callable[[Sequence[str]], Ran] = stream_ckpt,
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._away_s = folder, away_s
        self._launch, self._tool, self._pause = launch, tool, pause
        self._broker_dir = folder / "broker"
        self._trainers: list[Watched] = []
        self.records: dict[str, Record] = {}
        self._record = Record("")
        self._files = Job(f"file://{folder}/disk/log", f"file://{folder}/store")

    def run(self) -> None:
        """Play all incidents.

        Raises:
            DayError: one did not go as the page says.
        """
        try:
            self._on_kafka()
            self._on_files()
            self._on_two_tiers()
        finally:
            for trainer in self._trainers:
                trainer.kill()
            self._tool(["broker", "stop", "--dir", str(self._broker_dir)])

    # ---------------------------------------------------------------------------------------------------- on Kafka

    def _on_kafka(self) -> None:
        print(f"$ stream-ckpt broker start --dir {self._broker_dir} --secure", flush=True)
        self._run("broker", "start", "--dir", str(self._broker_dir), "--secure", "--with-parent")
        self._clients = self._broker()["clients"]
        uri = self._broker()["uri"].replace("/JOB", "/day")
        job = Job(uri, f"file://{self._folder}/kafka-store", ("--kafka-options", f"{self._clients}/trainer.properties"))
        trainer = self._train(job)
        trainer.marker(2, since=0)
        self._broker_away(job, trainer)
        self._broker_stopped(job, trainer)
        self._rights_withdrawn(job, trainer)
        self._clock_off(job, trainer)
        self._topic_retention(job, trainer)
        trainer.kill()

    def _broker_away(self, job: Job, trainer: Watched) -> None:
        self._begin("Broker away", f"The broker answers nobody for {self._away_s:.0f} s.")
        marker = trainer.marker()
        before = self._rows(job, marker)
        since = trainer.count
        self._kill_broker(signal.SIGSTOP)
        away = time.monotonic()
        self._see(trainer.line("the log accepts no frames", since))
        self._see(trainer.line(r"marker \S+ failed", since))
        time.sleep(max(0.0, away + self._away_s - time.monotonic()))
        since = trainer.count
        self._kill_broker(signal.SIGCONT)
        self._see(trainer.line("the log accepts frames again", since))
        self._check(f"the next marker is committed: {trainer.marker()}")
        self._do("list", job.uri, *job.options, "--newest", "3")
        self._same_rows(job, marker, before)

    def _broker_stopped(self, job: Job, trainer: Watched) -> None:
        self._begin("Broker stopped", "The broker is shut down.")
        since = trainer.count
        self._run("broker", "stop", "--dir", str(self._broker_dir))
        self._see(self._run("doctor", job.uri, *job.options, status=1).output)
        self._see(trainer.line("the log accepts no frames", since))
        self._do("broker", "start", "--dir", str(self._broker_dir), "--with-parent")
        self._see(trainer.line("the log accepts frames again", since))
        self._check(f"the next marker is committed: {trainer.marker()}")

    @contextlib.contextmanager
    def _log_refuses(self, job: Job, trainer: Watched, why: str, cause: Callable[[], T]) -> Iterator[T]:
        """The log takes no frames because of ``cause``, which the trainer names as ``why``, until the caller has ended
        it; nothing is lost meanwhile."""
        marker, since = trainer.marker(), trainer.count
        before = self._rows(job, marker)
        caused = cause()
        self._see(trainer.line(f"the log accepts no frames.*{why}", since))
        self._see(trainer.line(r"marker \S+ failed", since))
        yield caused
        self._see(trainer.line("the log accepts frames again", since))
        self._check(f"the next marker is committed: {trainer.marker()}")
        self._same_rows(job, marker, before)

    def _rights_withdrawn(self, job: Job, trainer: Watched) -> None:
        from confluent_kafka.admin import AclBindingFilter

        self._begin("Rights withdrawn", "Somebody deletes the rule that lets the trainer write.")
        rule = _allow("trainer", "*", "WRITE")
        names = ("restype", "name", "resource_pattern_type", "principal", "host", "operation", "permission_type")
        exactly = AclBindingFilter(*(getattr(rule, name) for name in names))
        with self._log_refuses(job, trainer, "permission denied", lambda: _done(self._admin.delete_acls([exactly]))):
            found = self._run("doctor", job.uri, *job.options, status=1).output
            self._see(found)
            for command in re.findall(r"kafka-acls\.sh .* --add .*", found):
                self._acls(command)

    def _clock_off(self, job: Job, trainer: Watched) -> None:
        self._begin("Clock off", "The topic takes no records that are 1 ms older than the broker's clock.")
        bounds = {"message_timestamp_type": "CreateTime", "message_timestamp_before_max_ms": "1"}
        with self._log_refuses(
            job, trainer, "too far from the broker's clock", lambda: self._configs(job, "", **bounds)
        ):
            found = self._run("doctor", job.uri, *job.options, status=1).output
            self._see(found)
            kinds = re.findall(r"(kafka-configs\.sh .* --add-config message\.timestamp\.type=(\S+))", found)
            for command, kind in kinds:
                self._configs(job, command, message_timestamp_type=kind)

    def _topic_retention(self, job: Job, trainer: Watched) -> None:
        from confluent_kafka import TopicPartition

        self._begin("Topic retention", "Somebody sets retention.ms on the topic, and the broker deletes rows.")
        self._run("materialize", job.uri, *job.options, "--store", job.store, "--once")
        marker = self._newest(job)
        before, since = self._rows(job, marker), trainer.count
        self._configs(job, "", retention_ms="1000")
        _done(self._admin.delete_records([TopicPartition(f"{job.name}.data", 0, 10)]))
        self._see(trainer.line(r"marker \S+ failed: rows from offset", since))
        found = self._run("doctor", job.uri, *job.options, status=1).output
        self._see(found)
        for command, value in re.findall(r"(kafka-configs\.sh .* --add-config retention\.ms=(\S+))", found):
            self._configs(job, command, retention_ms=value)
        admin = ("--kafka-options", f"{self._clients}/admin.properties")  # DELETE is nobody else's right
        since = trainer.count
        self._do("trim", job.uri, *admin, "--store", job.store, "--upto", "latest")
        self._check(f"the next marker is committed: {trainer.marker(since=since)}")
        self._same_rows(job, marker, before)

    # ---------------------------------------------------------------------------------------------------- on files

    def _on_files(self) -> None:
        job = self._files
        with self._small_disk() as problem:
            trainer = self._train(job)
            trainer.marker(2, since=0)
            self._disk_full(job, trainer, problem)
            self._two_trainers(job, trainer)
            self._run("materialize", job.uri, "--store", job.store, "--once")
            self._segment_lost(job)
            self._object_flipped(job)
            self._store_lost(job)
            self._wrong_store(job)

    def _disk_full(self, job: Job, trainer: Watched, problem: str) -> None:
        self._begin("Disk full", "The disk of the log has no room left.")
        if problem:
            self._record.not_played = problem
            print(f"not played: {problem}")
            return
        with self._log_refuses(job, trainer, "No space left", lambda: _fill(self._folder / "disk")) as ballast:
            self._see(self._run("doctor", job.uri, status=1).output)
            self._operator(f"rm {ballast}")
            ballast.unlink()

    def _two_trainers(self, job: Job, trainer: Watched) -> None:
        self._begin("Two trainers", "A second scheduler starts the same job.")
        right, since = trainer.marker(), trainer.count
        before = self._rows(job, right)
        wrong = self._train(job)
        self._see(trainer.line("Error: .*has taken over", since))
        trainer.end()
        wrong.marker(1, since=0)
        self._do("list", job.uri, "--tree")
        self._do("fence", job.uri, "--yes")
        self._see(wrong.line("Error: ", 0))
        wrong.end()
        again = self._train(job, "--restore", right)
        self._operator(f"start the right one again, with --restore {right}")
        self._check(again.line(f"restored marker {right} "))
        again.marker(2, since=0)
        again.kill()
        self._same_rows(job, right, before)

    def _segment_lost(self, job: Job) -> None:
        self._begin("Segment lost", "An object with rows is deleted from the store.")
        marker = self._newest(job)
        before = self._rows(job, marker)
        self._object("segments", "m00000001").unlink()
        self._see(self._run("verify", job.uri, status=1).output)
        self._do("scrub", job.uri, "--store", job.store, "--repair")
        self._run("verify", job.uri)
        self._same_rows(job, marker, before)

    def _object_flipped(self, job: Job) -> None:
        self._begin("Object flipped", "A disk flips one bit of the newest marker's dense state, which has no copy.")
        newest = self._newest(job)
        generation, number = map(int, newest.split(":"))
        path = self._object("dense", f"g{generation:08d}-m{number:08d}/__0_0.distcp")
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        trainer = self._train(job)
        self._see(trainer.line("is damaged; falling back"))
        older = trainer.line("restored marker ").split()[2]
        self._check(f"the restart went back by itself, from {newest} to {older}")
        trainer.marker(1, since=0)
        trainer.kill()
        before = self._rows(job, older)
        self._see(self._run("scrub", job.uri, "--store", job.store, "--repair", status=1).output)
        self._do("gc", job.uri, "--store", job.store, "--give-up", newest)
        self._run("scrub", job.uri, "--store", job.store)
        self._see(self._run("verify", job.uri, "--marker", newest, status=1).output)
        self._same_rows(job, older, before)

    def _store_lost(self, job: Job) -> None:
        self._begin("STORE lost", "The object that names the format of the store is deleted.")
        marker = self._newest(job)
        before = self._rows(job, marker)
        self._object("", "store/STORE").unlink()
        self._see(self._run("verify", job.uri, "--store", job.store, status=1).output)
        self._see(self._run("doctor", job.uri, "--store", job.store, status=1).output)
        self._do("scrub", job.uri, "--store", job.store, "--repair")
        self._run("doctor", job.uri, "--store", job.store)
        self._same_rows(job, marker, before)

    def _wrong_store(self, job: Job) -> None:
        self._begin("Wrong store", "A command gets the store of another job.")
        marker = self._newest(job)
        before = self._rows(job, marker)
        other = f"file://{self._folder}/kafka-store"
        self._see(self._run("verify", job.uri, "--store", other, status=1).output)
        self._see(self._run("list", job.uri, "--store", other, status=1).output)
        self._do("verify", job.uri, "--store", job.store)
        self._same_rows(job, marker, before)

    # ------------------------------------------------------------------------------------------------ on two tiers

    def _on_two_tiers(self) -> None:
        node, outer = self._folder / "node", f"file://{self._folder}/outer"
        job = Job(f"file://{node}/log", f"file://{self._folder}/outer-store", outer=outer)
        self._begin("Node lost", "A job with two tiers loses its node, and the disk with the inner log.")
        trainer = self._train(job)
        marker = trainer.marker(3, since=0)
        self._run("relay", job.uri, outer, "--status")
        trainer.kill()
        self._run("relay", job.uri, outer, "--once")  # what the relay still does after the trainer
        before = self._rows(replace(job, uri=outer), marker)
        shutil.rmtree(node)
        again = self._train(job)
        self._see(again.line("the inner log .* is empty"))
        restored = again.line("restored marker ")
        self._see(restored)
        self._operator("start the job on another node, with the same two URIs")
        again.marker(1, since=0)
        again.kill()
        self._do("list", outer, "--tree")
        self._check(restored)
        self._same_rows(replace(job, uri=outer), marker, before)

    # ------------------------------------------------------------------------------------------- what they share

    def _begin(self, name: str, text: str) -> None:
        if self.records:
            self._pause()
        self._record = self.records[name] = Record(name)
        page = f"{PAGE}#{name.lower().replace(' ', '-')}"
        print(f"\n== {len(self.records)}. {name}\n{text}\npage: {page}", flush=True)

    def _see(self, text: str) -> None:
        self._record.seen.append(text)
        for line in text.splitlines():
            if not line.startswith(("┃", "┏", "┡", "└", "│")) or "bad" in line:
                print(f"  sees: {line}", flush=True)

    def _check(self, text: str) -> None:
        self._record.checked.append(text)
        print(f"  checked: {text}", flush=True)

    def _operator(self, command: str) -> None:
        self._record.commands.append(command)
        print(f"$ {command}", flush=True)

    def _do(self, *arguments: str) -> Ran:
        """Run the operator's command."""
        self._operator(f"stream-ckpt {shlex.join(arguments)}")
        return self._run(*arguments)

    def _run(self, *arguments: str, status: int = 0) -> Ran:
        ran = self._tool(arguments)
        if ran.status != status:
            raise DayError(f"stream-ckpt {shlex.join(arguments)} ended with {ran.status}, not {status}:\n{ran.output}")
        return ran

    def _train(self, job: Job, *more: str) -> Watched:
        words = ["train", *job.flags(), *more]
        trainer = Watched(self._launch(1, Path(__file__), *words), self._folder / "train.log")
        self._trainers.append(trainer)
        return trainer

    def _newest(self, job: Job) -> str:
        """Name of the newest marker."""
        markers = json.loads(self._run("list", job.uri, *job.options, "--json").output)["markers"]
        return str(markers[-1]["marker"])

    def _rows(self, job: Job, marker: str) -> dict[str, bytes]:
        """All rows of a marker, by file of an export."""
        to = self._folder / "export"
        words = ("export", job.uri, *job.options, "--marker", marker, "--to", f"safetensors://{to}", "--force")
        self._run(*words)
        return {path.name: path.read_bytes() for path in to.glob("*.safetensors")}

    def _same_rows(self, job: Job, marker: str, before: dict[str, bytes]) -> None:
        if not before or self._rows(job, marker) != before:
            raise DayError(f"marker {marker} of {job.uri} has other rows than before the incident")
        self._check(f"marker {marker} restores the same rows, bit for bit")

    def _object(self, folder: str, end: str) -> Path:
        """A file of the files job's store."""
        store = Path(self._files.store.removeprefix("file://"))
        return next(path for path in sorted((store / folder).rglob("*")) if path.is_file() and end in str(path))

    @contextlib.contextmanager
    def _small_disk(self) -> Iterator[str]:
        """Mount a small file system for the log. Yields the reason if that is not possible, otherwise an empty text."""
        folder = self._folder / "disk"
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            yield "there is no mount(8)"
            return
        if done.returncode:
            yield (done.stderr.strip().splitlines() or ["mount(8) failed"])[-1]
            return
        try:
            yield ""
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)

    # ---------------------------------------------------------------------------------------------- on the broker

    def _broker(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(
            self._run("broker", "status", "--dir", str(self._broker_dir), "--json").output
        )
        return status

    def _kill_broker(self, number: signal.Signals) -> None:
        os.kill(int(self._broker()["pid"]), number)

    @cached_property
    def _admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        from torchrec_stream_ckpt.log.api import load_options

        options = load_options(f"{self._clients}/admin.properties")
        return AdminClient({"bootstrap.servers": self._broker()["bootstrap"], **options})

    def _configs(self, job: Job, command: str, **settings: str) -> None:
        """Do the work of ``kafka-configs.sh`` by Kafka's client for Python."""
        from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

        if command:
            self._operator(command)
        entries = [
            ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        topic = ConfigResource(ConfigResource.Type.TOPIC, f"{job.name}.data", incremental_configs=entries)
        _done(self._admin.incremental_alter_configs([topic]))

    def _acls(self, command: str) -> None:
        """Do the work of ``kafka-acls.sh`` by Kafka's client for Python."""
        self._operator(command)
        words = shlex.split(command)
        topic, user = words[words.index("--topic") + 1], words[words.index("--allow-principal") + 1]
        rights = [words[place + 1] for place, word in enumerate(words) if word == "--operation"]
        rules = [_allow(user.removeprefix("User:"), topic, right) for right in rights]
        _done(self._admin.create_acls(rules))


def _allow(user: str, topic: str, operation: str) -> AclBinding:
    from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

    kind, pattern, allow = ResourceType.TOPIC, ResourcePatternType.LITERAL, AclPermissionType.ALLOW
    return AclBinding(kind, topic, pattern, f"User:{user}", "*", AclOperation[operation], allow)


def _done(futures: dict[Any, Any]) -> None:
    for future in futures.values():
        future.result(WAIT_S)


def _fill(folder: Path) -> Path:
    """Fill a file system, but for less than a page."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


def train(words: Sequence[str]) -> None:
    """Train a small table on one rank, and rest after each step, until somebody ends it."""
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import Adagrad

    from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, init_ranks, log_to_stderr
    from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, restore_from

    parser = FlagParser()
    add_flags(parser)
    parser.add_argument("--rest_s", type=float)
    args = parser.parse_args(words)
    config = config_from(args)
    assert config is not None
    rank, _ = init_ranks("gloo")
    log_to_stderr(rank)
    table = EmbeddingBagConfig(name="t_item", num_embeddings=10_000, embedding_dim=16, feature_names=["item"])
    ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(Adagrad, ebc.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(torch.nn.Sequential(ebc), device=torch.device("cpu"))
    try:
        settings = replace(config, commit_timeout_s=NO_ANSWER_S)
        with StreamCheckpointer(model, model.fused_optimizer, config=settings) as ckpt:
            restore_from(args, ckpt)
            while True:
                items = 7 * torch.arange(ckpt.steps, ckpt.steps + 20) % 1000
                batch = KeyedJaggedTensor(["item"], items, lengths=torch.ones(20, dtype=torch.int32))
                (model(batch)["item"] - 1).square().mean().backward()
                ckpt.step()
                time.sleep(args.rest_s)
    except StreamCkptError as error:
        sys.exit(f"Error: {error}")
    finally:
        dist.destroy_process_group()


def _wait_for_enter() -> None:
    input("\n-- Enter to go on, Ctrl-C to end --")


def main() -> int:
    """The day, from the command line."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("incidents-run"), help="folder for it (default: %(default)s)")
    parser.add_argument(
        "--away_s", type=float, default=180.0, help="length of the first incident (default: %(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="do not wait for Enter between incidents")
    args = parser.parse_args()
    folder = args.dir.absolute()
    if folder.exists():
        if not (folder / MARK).exists():
            parser.error(f"{folder} exists and was not made by this script: name another one with --dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    started = time.monotonic()
    try:
        day = Day(folder, args.away_s, pause=_wait_for_enter if sys.stdin.isatty() and not args.yes else lambda: None)
        day.run()
    except DayError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"\nThat was the day: {len(day.records)} incidents in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
