"""A security token service on loopback: it gives the login of the test server for a web identity token."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs
from uuid import uuid4

from tests.s3.server import KEY, SECRET

ROLE = "arn:aws:iam::123456789012:role/trainer"
CLIENTS_RENEW_S = 600
"""Seconds before the end of a session at which the client must renew it (botocore)."""
_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}
</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{end}</Expiration></Credentials>
<AssumedRoleUser><Arn>{role}/s</Arn><AssumedRoleId>A:s</AssumedRoleId></AssumedRoleUser>
</AssumeRoleWithWebIdentityResult><ResponseMetadata><RequestId>x</RequestId></ResponseMetadata>
</AssumeRoleWithWebIdentityResponse>"""
_ERROR = "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>no</Message></Error></ErrorResponse>"


class TokenService:
    """Answers ``AssumeRoleWithWebIdentity``, as STS does for the pods of EKS.

    Args:
        token: File with the web identity token that is valid now. It may change.
        renew_s: Seconds after which a client must renew its session.
    """

    def __init__(self, token: Path, renew_s: float) -> None:
        self.sessions: list[str] = []
        """Tokens of the sessions that were given, oldest first."""
        self.ended = 0
        """Number of the oldest ones that have ended."""
        self.refuse = ""
        """Code of the error that all clients get; empty for none."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                status, text = service.answer(asked["Action"], asked["RoleArn"], asked["WebIdentityToken"], token)
                self.send_response(status)
                self.send_header("Content-Type", "text/xml")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self._renew_s = renew_s
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def environment(self, token: Path) -> dict[str, str]:
        """Variables that a cluster puts into a pod, and the address of this service."""
        return {
            "AWS_ROLE_ARN": ROLE,
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
            "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def answer(self, action: list[str], role: list[str], shown: list[str], token: Path) -> tuple[int, str]:
        """Status and body for the arguments of a request."""
        assert (action, role) == (["AssumeRoleWithWebIdentity"], [ROLE])
        with self._lock:
            if self.refuse or shown != [token.read_text()]:
                return 403, _ERROR.format(code=self.refuse or "InvalidIdentityToken")
            session = f"session-{len(self.sessions)}-{uuid4().hex}"
            self.sessions.append(session)
        end = datetime.now(UTC) + timedelta(seconds=CLIENTS_RENEW_S + self._renew_s)
        found = {"key": KEY, "secret": SECRET, "token": session, "end": f"{end:%Y-%m-%dT%H:%M:%SZ}", "role": ROLE}
        return 200, _ANSWER.format(**found).replace("\n</Secret", "</Secret")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
