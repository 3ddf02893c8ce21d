"""What rank 0 starts: ``python -m torchrec_stream_ckpt.tiers.child``. One line of JSON on stdin says what to do.

Standard input is the tether, and so is the parent: when either is gone, the trainer has ended, and what it has captured
is copied yet, for a bounded time. Secrets among the options so stand on no command line. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
from collections.abc import Callable
from typing import Any

from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.errors import FencedError, StreamCkptError
from torchrec_stream_ckpt.route.tiers import open_tiers
from torchrec_stream_ckpt.service import Event
from torchrec_stream_ckpt.tiers.process import FENCED
from torchrec_stream_ckpt.tiers.relay_service import RelayService

log = logging.getLogger("torchrec_stream_ckpt.relay")


def main() -> int:
    """Run until the trainer is gone and all is copied; 0 then, ``FENCED``, or 1 if something is wrong."""
    said: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    try:
        tiers = open_tiers(StreamConfig(**said["config"]))
        service = RelayService(tiers, _report, _gone(said["parent"]), said["linger_s"])
        with contextlib.closing(tiers.inner), contextlib.closing(tiers.outer):
            done = service.run(poll_s=said["poll_s"])
    except FencedError as error:
        log.warning("%s", error.headline)
        return FENCED
    except StreamCkptError as error:
        log.error("%s", error)
        return 1
    if not done:
        log.warning("the trainer is gone, and the outer tier does not have all that it committed")
    return 0 if done else 1


def _gone(parent: int) -> Callable[[], bool]:
    """Return a function that tells whether the trainer has ended, or has let go."""

    def gone() -> bool:
        if os.getppid() != parent:
            return True
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
        return bool(ready) and not os.read(sys.stdin.fileno(), 1)

    return gone


def _report(event: Event) -> None:
    fields = event.fields
    if event.event == "trouble":
        log.warning("the outer tier gets nothing now, training and the inner tier go on: %s", fields["message"])
    elif event.event == "recovered":
        log.warning("the outer tier gets markers again")
    elif event.event == "passed":
        log.warning("the outer tier does not get marker %s, and goes on: %s", fields["marker"], fields["message"])
    elif event.event == "marker":
        log.debug("marker %s is on the outer tier", fields["marker"])


if __name__ == "__main__":
    sys.exit(main())
