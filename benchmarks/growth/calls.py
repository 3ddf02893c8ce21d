"""Calls on a job on paper: commands of the command line, and the readers of a Python program."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import without_fsync

from torchrec_stream_ckpt import StreamReader, open_marker
from torchrec_stream_ckpt.cli.main import app

COMMANDS: dict[str, tuple[str, ...]] = {
    "materialize, catch-up": ("materialize", "LOG", "--store", "STORE", "--once", "--json"),
    "materialize, nothing new": ("materialize", "LOG", "--store", "STORE", "--once", "--json"),
    "list": ("list", "LOG", "--store", "STORE", "--json"),
    "list --tree": ("list", "LOG", "--store", "STORE", "--tree"),
    "list --newest 1": ("list", "LOG", "--store", "STORE", "--newest", "1", "--json"),
    "show": ("show", "LOG", "--store", "STORE", "--json"),
    "verify": ("verify", "LOG", "--json"),
    "verify, from the store": ("verify", "LOG", "--store", "STORE", "--json"),
    "doctor": ("doctor", "LOG", "--json"),
    "report": ("report", "LOG", "--store", "STORE", "--out", "PAGE"),
    "trim --dry-run": ("trim", "LOG", "--store", "STORE", "--dry-run", "--json"),
    "gc --dry-run": ("gc", "LOG", "--store", "STORE", "--newest", "2", "--dry-run", "--json"),
    "scrub": ("scrub", "LOG", "--store", "STORE", "--json"),
    "watch --once": ("watch", "LOG", "--store", "STORE", "--once", "--json"),
    "follow --once": ("follow", "LOG", "--store", "STORE", "--once", "--json"),
    "diff --sent": ("diff", "LOG", "1:1", "NEWEST", "--sent", "--store", "STORE", "--json"),
    "export": ("export", "LOG", "--store", "STORE", "--to", "EXPORT", "--force", "--json"),
    "recover": ("recover", "NEW", "--store", "STORE", "--json"),
}
"""In this order: the first one makes the store that the others read. It also merges."""
CHANGING = ("materialize, catch-up", "scrub", "export")
"""Calls that do less a second time: each of their two runs has a copy of the job for itself."""
_ALERTS = "watch"
"""A command that ends with status 1 if there is an alert: a job on paper has no trainer that is alive."""


def call(root: Path, name: str) -> None:
    """Make one call in this process.

    Raises:
        RuntimeError: a command failed; the message holds its output.
    """
    with without_fsync():
        if name in READERS:
            READERS[name](f"file://{root / 'log'}", str(root / "store"))
        else:
            command(root, COMMANDS[name])


def command(root: Path, words: tuple[str, ...]) -> None:
    """Run a command of the command line; raises as :func:`call`."""
    newest = root / "newest"
    places = {
        "LOG": f"file://{root / 'log'}",
        "STORE": str(root / "store"),
        "PAGE": str(root / "page.html"),
        "EXPORT": f"safetensors://{root / 'export'}",
        "NEW": f"file://{root / 'new'}",
        "NEWEST": newest.read_text() if newest.exists() else "",
    }
    shutil.rmtree(root / "new", ignore_errors=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), without_fsync():
        try:
            status = app([places.get(word, word) for word in words], standalone_mode=False)
        except SystemExit as end:
            status = end.code
    if status not in (0, None) and not (words[0] == _ALERTS and status == 1):
        raise RuntimeError(f"{' '.join(words)}: {said.getvalue()[-500:]}")


def _open_marker(uri: str, store: str) -> None:
    """Read a row of each table."""
    with open_marker(uri, "latest", store=store) as marker:
        for table in marker.tables.values():
            _ = table[[0]]


def _stream_reader(uri: str, store: str) -> None:
    """Load each table whole with ``dcp.load``."""
    reader = StreamReader(uri, store=store)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if name.endswith(".weight")
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)


READERS: dict[str, Callable[[str, str], None]] = {"open_marker": _open_marker, "StreamReader": _stream_reader}
CALLS = (*COMMANDS, *READERS)
