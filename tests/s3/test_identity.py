"""A log whose login is a role of its pod: a web identity token, sessions that end, and files that are replaced."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_log_contract import control_record
from tests.parts import open_log
from tests.s3.faults import FaultyProxy
from tests.s3.server import KEY, SECRET, S3Server
from tests.s3.sts import TokenService
from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.inner import Log

pytestmark = pytest.mark.usefixtures("short_pauses")
LOGINS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ROLE_ARN")


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyProxy]:
    """The only login and address are those that a test sets."""
    found = FaultyProxy(s3_server.port)
    for name in LOGINS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", found.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    yield found
    found.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("first")
    return path


@pytest.fixture
def service(token: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenService]:
    """The bucket accepts the sessions that have not ended."""
    found = TokenService(token, 1.0)
    for name, value in found.environment(token).items():
        monkeypatch.setenv(name, value)
    proxy.accept_session = lambda session: session in found.sessions[found.ended :]
    yield found
    found.close()


def open_here(server: S3Server, name: str) -> Log:
    config: dict[str, Any] = {"retries": {"max_attempts": 1}}
    return open_log(f"s3://{server.bucket}/{name}", {"config_kwargs": json.dumps(config)})


def renewal_is_due(service: TokenService) -> None:
    """The whole second in which a session ends is over."""
    given = len(service.sessions)
    assert given
    time.sleep(2.1)
    service.ended = given


def test_sessions_of_a_web_identity_are_renewed_while_a_log_is_open(
    s3_server: S3Server, proxy: FaultyProxy, service: TokenService, token: Path
) -> None:
    log = open_here(s3_server, "renewed")
    log.prepare(1)
    first = len(service.sessions)
    renewal_is_due(service)
    token.write_text("second")  # as the cluster does: the file is read again
    log.append_control(control_record(1))
    assert len(service.sessions) > first
    assert [record for _, record in log.read_control()] == [control_record(1)]
    log.close()


@pytest.mark.parametrize("code", ["AccessDenied", "ExpiredTokenException", "InvalidIdentityToken"])
def test_a_role_that_is_refused_is_named_and_the_log_goes_on_later(
    s3_server: S3Server, proxy: FaultyProxy, service: TokenService, code: str
) -> None:
    log = open_here(s3_server, f"refused-{code}")
    log.prepare(1)
    renewal_is_due(service)
    service.refuse = code
    with pytest.raises(LogUnavailableError, match=f"the token service refuses the role .{code}.") as refused:
        log.control_base()
    assert "AWS_WEB_IDENTITY_TOKEN_FILE" in refused.value.hint
    service.refuse = ""
    assert log.append_control(control_record(1)) == 0
    log.close()


def test_a_session_in_a_file_that_was_replaced_is_read_again(
    s3_server: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a side-car writes it: the client would go on with the old one for ever."""
    file, now = tmp_path / "credentials", "old"
    proxy.accept_session = lambda session: session == now

    def write(session: str) -> None:
        keys = f"aws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
        file.write_text(f"[default]\n{keys}aws_session_token={session}\n")

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write("old")
    log = open_here(s3_server, "replaced")
    log.prepare(1)
    assert log.append_control(control_record(1)) == 0
    now = "new"  # and the old one has ended
    with pytest.raises(LogUnavailableError, match="the session's token has expired"):
        log.control_base()
    write("new")
    assert log.control_base() == 0
    assert log.append_control(control_record(2)) == 1
    log.close()
