"""TLS, logins and rights on a real broker: who may, may; why somebody may not is named; and no secret shows."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.builders import Stream, claim, commit, write
from tests.inside import inside
from tests.jobs import attach
from tests.kafka.secure import HANG_S, WRONG, CommandLines, Options, Secure, Wrong, admin, allow_again, forbid
from tests.model import PLAN_2, differences, trainer, truth
from tests.parts import Broker, Freed, main, open_log, trim_log
from tests.sampled import marks_of
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerFailedError,
    StreamCkptError,
)
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = pytest.mark.kafka


# Who may, may.


@pytest.mark.parametrize(
    ("protocol", "mechanism"),
    [
        ("SASL_SSL", "SCRAM-SHA-512"),
        ("SASL_SSL", "PLAIN"),
        ("SASL_PLAINTEXT", "SCRAM-SHA-512"),
        ("SASL_PLAINTEXT", "PLAIN"),
        ("SSL", None),
    ],
)
def test_every_way_of_logging_in_writes_marks_and_reads(secure: Secure, protocol: str, mechanism: str | None) -> None:
    if mechanism is None:
        options = secure.options("trainer-tls")
    else:
        options = secure.options("trainer") | {"security.protocol": protocol, "sasl.mechanism": mechanism}
    log = open_log(secure.uri(protocol), options)
    log.preflight()
    log.prepare(2)
    offset = log.append_control(b"marked")
    writer = log.open_writer(1, 1, 0)
    writer.send(memoryview(b"rows"))
    acks = writer.poll(10.0)
    writer.close()
    assert list(log.read_control()) == [(offset, b"marked")]
    assert [bytes(frame) for _, frame in log.read(LogSpan(1, 1, acks[0].offset, acks[0].end))] == [b"rows"]
    log.close()


# Why somebody may not is named, in time.


@pytest.fixture(scope="module")
def refusals(secure: Secure) -> dict[str, StreamCkptError]:
    """All mistakes, some at once: the error of each."""

    def make(wrong: Wrong) -> StreamCkptError:
        with pytest.raises(StreamCkptError) as refused:
            open_log(wrong.uri(secure), wrong.options(secure)).preflight()
        return refused.value

    with ThreadPoolExecutor(6) as pool:  # most of it is waiting
        return dict(zip(WRONG, pool.map(make, WRONG.values()), strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_the_true_cause_is_named(secure: Secure, refusals: dict[str, StreamCkptError], name: str) -> None:
    error = refusals[name]
    text = " ".join(str(error).split())
    assert re.search(WRONG[name].named, text), text
    assert "wrong-horse" not in text
    assert error.hint
    secure.told.append(str(error))


def cli(secure: Secure, *arguments: str) -> tuple[int, str]:
    """The program as people run it, errors included."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    keep = sys.stdout, sys.stderr
    sys.argv, sys.stdout, sys.stderr = ["stream-ckpt", *arguments], out, err
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.argv, (sys.stdout, sys.stderr) = argv, keep
    text = out.getvalue() + err.getvalue()
    secure.told.append(text)
    return status, text


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks_of(name, ("untrusted CA",)))
        for name in ("wrong password", "untrusted CA", "plaintext to a TLS port")
    ],
)
def test_the_command_line_names_the_cause_and_what_to_try(secure: Secure, tmp_path: Path, name: str) -> None:
    wrong, file = WRONG[name], tmp_path / "options"
    file.write_text("".join(f"{key}={value}\n" for key, value in wrong.options(secure).items()))
    status, text = cli(secure, "list", wrong.uri(secure), "--json", "--kafka-options", str(file))
    assert (status, "Traceback" in text) == (1, False)
    assert text.startswith("Error: Kafka at ")
    assert "\nTry: " in text
    assert re.search(wrong.named, " ".join(text.split()))


def test_a_user_without_the_right_to_make_topics_is_told_so_before_anything_is_made(secure: Secure) -> None:
    log = open_log(secure.uri(job="never"), secure.options("reader"))
    for attempt in (log.preflight, lambda: log.prepare(1)):
        with pytest.raises(LogUnavailableError, match=r"cannot create topic never\..*permission denied by") as refused:
            attempt()
        assert "CREATE" in refused.value.hint
    assert log.incarnation() is None
    log.close()


def test_doctor_tells_a_user_without_rights_before_the_job_begins(secure: Secure, tmp_path: Path) -> None:
    uri = secure.uri(job="planned")
    for user, allowed in (("reader", False), ("trainer", True)):
        options = ["--kafka-options", str(secure.directory / "clients" / f"{user}.properties")]
        status, text = cli(secure, "doctor", uri, "--new", "--store", str(tmp_path), "--json", *options)
        found = {each["check"]: each for each in json.loads(text)}
        assert status == (0 if allowed else 1)
        for topic in ("planned.data", "planned.control"):
            assert found[f"{topic}: creation"]["verdict"] == ("ok" if allowed else "bad")
            assert ("CREATE" in found[f"{topic}: creation"]["hint"]) is not allowed
        assert "READ, WRITE, DESCRIBE and DESCRIBE_CONFIGS" in found["not tried: rights"]["found"]
    log = open_log(uri, secure.options("trainer"))
    assert log.incarnation() is None
    log.close()


def test_a_user_who_may_only_read_reads_and_is_told_that_he_may_not_write(secure: Secure) -> None:
    uri = secure.uri()
    log = open_log(uri, secure.options("trainer"))
    incarnation = log.prepare(1)
    log.append_control(claim(1, incarnation=incarnation.id).to_frame())
    log.close()
    reader = open_log(uri, secure.options("reader"))
    assert len(list(reader.read_control())) == 1
    for attempt in (reader.preflight, lambda: reader.prepare(1)):
        with pytest.raises(LogUnavailableError, match="user 'reader' has no right to WRITE topic") as refused:
            attempt()
        cluster = f"--bootstrap-server {secure.status.listeners['SASL_SSL']} --command-config ADMIN.properties"
        assert f"kafka-acls.sh {cluster} --add --allow-principal User:reader --topic" in refused.value.hint
        assert "--operation WRITE" in refused.value.hint
    with pytest.raises(StreamCkptError, match="permission denied by the broker"):
        reader.append_control(b"x")
    reader.close()
    options = ["--kafka-options", str(secure.directory / "clients" / "reader.properties")]
    assert json.loads(cli(secure, "list", uri, "--json", *options)[1])["generations"] == 1
    status, text = cli(secure, "fence", uri, "--yes", *options)
    assert (status, "has no right to WRITE" in text, "\nTry: " in text) == (1, True, True)
    assert "WRITE not allowed" in cli(secure, "doctor", uri, "--json", *options)[1]


def test_a_user_without_the_right_to_delete_is_told_so_before_anything_is_said(secure: Secure) -> None:
    uri = secure.uri()
    topic = f"{uri.rsplit('/', 1)[1]}.data"
    log = open_log(uri, secure.options("trainer"))
    incarnation, stream = log.prepare(1), Stream()
    stream.mark(1)
    acks = write(log, stream.frames, timeout_s=120.0)
    made = commit(1, 1, [stream.end(acks[0].offset, acks[-1].end)])
    for record in (claim(1, incarnation=incarnation.id), made):
        log.append_control(record.to_frame())
    with pytest.raises(LogUnavailableError, match=f"user 'trainer' has no right to DELETE topic '{topic}'") as refused:
        trim_log(log, Control(log), made, "s3://bucket/job")
    assert f"--allow-principal User:trainer --topic {topic} --operation DELETE" in refused.value.hint
    assert not Control(log).refresh().trims
    log.close()
    operator = open_log(uri, secure.options("admin"))
    done = trim_log(operator, Control(operator), made, "s3://bucket/job")
    assert (done.appended, done.freed) == (True, Freed("records", 2, None))
    operator.close()


def test_a_user_without_the_right_to_read_is_told_so(secure: Secure) -> None:
    uri = secure.uri()
    topic = f"{uri.rsplit('/', 1)[1]}.control"
    log = open_log(uri, secure.options("trainer"))
    log.prepare(1)
    log.append_control(b"x")
    client = admin(secure)
    forbid(client, topic, "READ")
    with pytest.raises(LogUnavailableError, match=f"user 'trainer' has no right to READ topic '{topic}'"):
        log.preflight()
    with pytest.raises(LogUnavailableError, match=r"permission denied by the broker .*Topic authorization failed"):
        list(log.read_control())
    options = ["--kafka-options", str(secure.directory / "clients" / "trainer.properties")]
    status, text = cli(secure, "list", uri, *options)
    assert (status, "permission denied by" in text, "\nTry: " in text) == (1, True, True)
    allow_again(client, topic, "READ")
    assert len(list(log.read_control())) == 1
    log.close()


# A whole job.


def _refused_attach(uri: str, store: str, options: Options) -> str:
    wrong = options | {"sasl.password": "wrong-horse"}
    job = trainer(PLAN_2)
    with pytest.raises(LogUnavailableError, match="the broker rejected the login") as refused:
        StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, store=store, kafka_options=wrong))
    return str(refused.value)


def _job(uri: str, store: str, options: Options, administrator: Options, key: str) -> dict[str, Any]:
    """Trains; at step 4 the right to write is taken away under the job, later it is given back."""
    from confluent_kafka.admin import AdminClient

    heard = io.StringIO()
    logging.basicConfig(stream=heard, level=logging.DEBUG)
    told = _refused_attach(uri, store, options)
    address, name = uri.removeprefix("kafka://").split("/")
    client = AdminClient({"bootstrap.servers": address, **administrator}) if not dist.get_rank() else None
    job = trainer(PLAN_2)
    config = StreamConfig(
        uri=uri, store=store, kafka_options=options, marker_every=None, commit_timeout_s=60.0, commit_key_file=key
    )
    checkpointer = attach(job, config)
    assert checkpointer.restore() is None

    def train(steps: int) -> None:
        for _ in range(steps):
            job.step()
            checkpointer.step()

    train(3)
    first = checkpointer.mark().result(HANG_S)
    if client is not None:  # an idle client has length 0
        forbid(client, f"{name}.data", "WRITE")
    dist.barrier()
    train(3)
    deadline = time.monotonic() + HANG_S
    while dist.get_rank() == 0 and checkpointer.stats().log_up:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    dist.barrier()
    with (
        inside(checkpointer).commit_timeout(4.0),  # nothing comes: only this marker has to wait for that
        pytest.raises(MarkerFailedError, match="permission denied by the broker") as failed,
    ):
        checkpointer.mark().result(HANG_S)
    if client is not None:
        allow_again(client, f"{name}.data", "WRITE")
    dist.barrier()
    train(2)
    for _ in range(5):  # until the broker has heard of it
        try:
            last = checkpointer.mark().result(HANG_S)
            break
        except MarkerFailedError:
            continue
    state = truth(job)
    checkpointer.close()
    texts = [told, str(failed.value), heard.getvalue(), repr(config)]
    return {"markers": (str(first.id), str(last.id)), "step": last.step, "truth": state, "told": texts}


def _restored(uri: str, store: str, options: Options, key: str) -> tuple[str, dict[str, torch.Tensor]]:
    job = trainer(PLAN_2)
    job.step()
    checkpointer = attach(job, StreamConfig(uri=uri, store=store, kafka_options=options, commit_key_file=key))
    restored = checkpointer.restore()
    assert restored is not None
    state = truth(job)
    checkpointer.close()
    return str(restored.id), state


@pytest.mark.distributed
def test_a_job_over_tls_outlives_rights_that_are_taken_away_and_comes_back_bit_for_bit(
    secure: Secure, tmp_path: Path
) -> None:
    uri, options, key = secure.uri(), secure.options("trainer"), tmp_path / "commit.key"
    key.write_bytes(bytes(range(64, 96)))
    key.chmod(0o600)
    store = tmp_path / "store"
    watcher = CommandLines()
    watcher.start()
    results = ranks.run(2, _job, uri, f"file://{store}", options, secure.options("admin"), str(key))
    restored = ranks.run(2, _restored, uri, f"file://{store}", options, str(key))
    watcher.end()
    secure.command_lines |= watcher.seen
    for result, (marker, state) in zip(results, restored, strict=True):
        assert result["markers"][1] == marker
        assert result["step"] == 8
        assert differences(result["truth"], state) == []
        secure.told += result["told"]
        assert "permission denied by the broker" in result["told"][1]

    # Somebody with the right to write, and without the key, plants what he likes.
    log = open_log(uri, options)
    key_less = Control(log)
    lineage = key_less.refresh()
    newest = lineage.newest
    assert newest is not None
    owner = lineage.claims[lineage.newest_generation]
    taken = replace(owner, generation=owner.generation + 1, parent=newest.id)  # the last generation has ended
    log.append_control(taken.to_frame())
    log.append_control(commit(taken.generation, 1, job=taken.job, nonce=taken.nonce).to_frame())
    assert key_less.refresh().newest != newest
    log.append_control(b"no frame at all")
    with pytest.raises(CorruptionError):
        key_less.refresh()
    assert Control(log, key).refresh().newest == newest
    log.close()
    key_options = [
        "--kafka-options",
        str(secure.directory / "clients" / "trainer.properties"),
        "--commit-key-file",
        str(key),
    ]
    status, text = cli(secure, "list", uri, "--json", *key_options)
    assert (status, json.loads(text)["markers"][-1]["marker"]) == (0, str(newest.id))
    status, text = cli(secure, "verify", uri, *key_options)
    assert status == 0, text
    cli(secure, "show", uri, "--json", *key_options)
    cli(secure, "doctor", uri, "--json", *key_options)
    _check_no_secret_at_rest(secure, uri, store, key.read_bytes())


def _check_no_secret_at_rest(secure: Secure, uri: str, store: Path, key: bytes) -> None:
    """Neither in any record of the job nor in any file of its store."""
    log = open_log(uri, secure.options("admin"))
    incarnation = log.incarnation()
    assert incarnation is not None
    data = b"".join(record for _, record in log.read_control())
    lineage = Control(log, store.parent / "commit.key").refresh()
    for made in lineage.commits.values():
        for end in made.ranks:
            data += b"".join(bytes(frame) for _, frame in log.read(LogSpan(1, end.partition, end.begin, end.end)))
    files = [path.read_bytes() for path in store.rglob("*") if path.is_file()]
    assert files
    for secret in secure.secrets():
        assert secret.encode() not in data + b"".join(files)
    assert key not in data + b"".join(files)
    assert key.hex().encode() not in data + b"".join(files)
    log.close()


# No secret shows. These come last: they look at what all tests above have left.


def test_no_secret_stands_in_any_message_log_or_command_line(secure: Secure) -> None:
    told = "\n".join([secure.cli_output, secure.logged.getvalue(), *secure.told])
    assert len(secure.told) > len(WRONG)
    assert "FAIL [torchrec_stream_ckpt" in told  # the client's own log lines were kept
    lines = b"\n".join(secure.command_lines)
    assert b"kafka.Kafka" in lines
    assert b"keytool" in lines
    assert b"StorageTool" in lines
    broker_log = (secure.directory / "broker.log").read_text()
    for secret in {*secure.secrets(), "wrong-horse", bytes(range(64, 96)).hex()}:
        assert secret not in told
        assert secret not in broker_log
        assert secret.encode() not in lines


def test_the_clients_debug_log_shows_no_secret(secure: Secure, caplog: pytest.LogCaptureFixture) -> None:
    for user, more in (("trainer", {"sasl.mechanism": "PLAIN"}), ("trainer", {}), ("trainer-tls", {})):
        protocol = "SSL" if user == "trainer-tls" else "SASL_SSL"
        with caplog.at_level(logging.DEBUG):
            log = open_log(secure.uri(protocol), secure.options(user) | more | {"debug": "all"})
            assert log.incarnation() is None
            log.close()
    assert "SaslAuthenticate" in caplog.text or "SASL" in caplog.text
    assert len(caplog.text) > 10_000
    for secret in secure.secrets():
        assert secret not in caplog.text


def test_files_with_secrets_are_their_owners_alone(secure: Secure) -> None:
    secrets = [secret.encode() for secret in secure.secrets()]
    assert stat.S_IMODE(secure.directory.stat().st_mode) == 0o700
    files = [path for path in secure.directory.rglob("*") if path.is_file()]
    holding = [path for path in files if any(secret in path.read_bytes() for secret in secrets)]
    names = {str(path.relative_to(secure.directory)) for path in holding}
    clients = {f"clients/{user}.properties" for user in ("admin", "trainer", "reader", "trainer-tls")}
    assert names == {"server.properties", *clients}
    for path in [*holding, *secure.directory.rglob("*.p12")]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_broker_without_security_is_given_none_later(tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text("listeners=PLAINTEXT://127.0.0.1:9,CONTROLLER://127.0.0.1:10\n")
    with pytest.raises(ConfigError, match="was created without security, which cannot be added"):
        Broker(tmp_path).start(secure=True)


def test_a_restart_stays_secure_and_gives_no_right_back(secure: Secure) -> None:
    uri = secure.uri()
    topic = f"{uri.rsplit('/', 1)[1]}.data"
    log = open_log(uri, secure.options("trainer"))
    log.prepare(1)
    forbid(admin(secure), topic, "WRITE")
    log.close()
    broker = Broker(secure.directory)
    broker.stop()
    assert broker.start(die_with=os.getpid()).listeners == secure.status.listeners
    log = open_log(secure.uri(), secure.options("trainer"))
    log.prepare(1)
    log.close()
    log = open_log(uri, secure.options("trainer"))
    with pytest.raises(LogUnavailableError, match=f"user 'trainer' has no right to WRITE topic '{topic}'"):
        log.prepare(1)
    log.close()
