"""A real browser for tests: headless Chromium, driven over a pipe by its own protocol. No library, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_WAIT_S = 30.0


class Browser:
    """One page at a time. ``make test-tools`` brings the program; without it this fails, it skips nothing."""

    def __init__(self) -> None:
        program = next(filter(None, map(shutil.which, _NAMES)), None)
        assert program is not None, "no Chromium: make test-tools"
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        flags = ["--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{to_read} 4>&{to_write}',
                "bash",
                program,
                *root,
                *flags,
                "--remote-debugging-pipe",
                f"--user-data-dir={self._folder.name}",
                "about:blank",
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        """What the page's console has said, errors of loading and of its policy among it."""
        try:
            target = self._ask("Target.createTarget", url="about:blank")[
                "targetId"
            ]  # its own page may not be there yet
            self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, with all of its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._folder.cleanup()

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Load a file, on a screen of so many pixels."""
        self.complaints = []
        self.requests: list[str] = []
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._ask("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _WAIT_S
        while not self._loaded:
            self._take(deadline)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives; the page's own policy does not hold for it."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> bytes:
        """The whole page as PNG, kept at ``path``."""
        data = base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return data

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WAIT_S
        while True:
            answer = self._take(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]  # type: ignore[no-any-return]

    def _take(self, deadline: float) -> dict[str, Any]:
        """The next message; events are noted."""
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
