"""``stream-ckpt report``: show a job on one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from torchrec_stream_ckpt.cli.common import console, progress_bar
from torchrec_stream_ckpt.cli.options import JobOptions
from torchrec_stream_ckpt.cli.watch import Rate, Watcher, bytes_per_s
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.reporting.history import frames_bytes, read_history, read_stalls
from torchrec_stream_ckpt.extras.reporting.page import Report, page
from torchrec_stream_ckpt.util.units import size


def report_job(
    options: JobOptions,
    out: Annotated[Path, typer.Option("--out", help="The page to write.", metavar="FILE.html")],
    last: Annotated[
        int | None, typer.Option("--last", min=1, help="Read only the newest N markers (default: all).")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder of the job's scalars: the log does not hold its stalls.", metavar="DIR")
    ] = None,
    restore_mb_per_s: Rate = None,
) -> None:
    """Draw a job: its markers and branches, what each table sends, hot rows, stalls, how long restores take.

    Reads all frames of the markers that the log still holds, and changes nothing. It checks headers, but not payloads
    (verify does that). The page is self-contained.
    """
    stalls = read_stalls(tensorboard) if tensorboard is not None else None
    with options.open() as job:
        rate = bytes_per_s(options.uri, restore_mb_per_s)
        look = Watcher(job, rate).look()
        with progress_bar(quiet=False) as progress:
            task = progress.add_task("reading", total=frames_bytes(job.lineage, last))
            history = read_history(job.log, job.lineage, last, lambda count: progress.advance(task, count))
        report = Report(
            uri=options.uri, look=look, lineage=job.lineage, history=history, stalls=stalls, bytes_per_s=rate, last=last
        )
        _write(out, page(report))
    console().print(f"{out}: {size(out.stat().st_size)}", highlight=False, markup=False, soft_wrap=True)


def _write(out: Path, text: str) -> None:
    """Write the page as a whole, or not at all."""
    new = out.parent / f".{out.name}.new"  # with_name() refuses folders without a name, such as /
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, out)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(
            f"the page cannot be written: {error.strerror}", hint="name another file with --out", path=out
        ) from None
