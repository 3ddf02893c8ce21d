"""Logs and stores that were changed, with all checksums, counts and chains made right again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.parts import FileLog, decode_chunk, entries_of, lay_out, parse_front
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, parse_header, payload_of, seal
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Catalog, Control, Log, open_store
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, DATA_DIR, RECORDS_DIR, manifest_name
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd

Frames = list[tuple[Header, bytes]]
"""Of one stream, with their payloads."""


def on_rank_0(operate: Callable[[Frames], Frames]) -> Callable[[int, int, Frames], Frames]:
    """For :func:`forge`: the streams of rank 0 alone."""
    return lambda _, rank, frames: operate(frames) if rank == 0 else frames


def forge(source: Path, target: Path, operate: Callable[[int, int, Frames], Frames]) -> None:
    """:func:`copy_log` from a folder into a new one, with the dense state."""
    shutil.copytree(source, target)
    shutil.rmtree(target / DATA_DIR)
    shutil.rmtree(target / RECORDS_DIR, ignore_errors=True)  # the second copy of control records
    (target / CONTROL_FILE).unlink()
    copy_log(FileLog(source), FileLog(target), operate)


def copy_log(old: FileLog, new: Log, operate: Callable[[int, int, Frames], Frames]) -> None:
    """Write a log anew.

    Args:
        old: What is copied.
        new: An empty one.
        operate: (generation, rank, frames) -> frames.
    """
    lineage = Control(old).refresh()
    ends: dict[tuple[MarkerId, int], RankEnd] = {}
    for _, record in old.read_control():
        said = parse_control(record)
        if isinstance(said, Claim):
            new.prepare(said.world)
            incarnation = new.incarnation()
            assert incarnation is not None
            new.append_control(replace(said, incarnation=incarnation.id).to_frame())
            commits = [commit for commit in lineage.commits.values() if commit.generation == said.generation]
            for end in commits[-1].ranks if commits else ():
                ends |= _copy(old, new, said.generation, end, operate)
        elif isinstance(said, Commit):
            moved = tuple(ends[said.id, end.rank] for end in said.ranks)
            new.append_control(replace(said, ranks=moved).to_frame())
        else:
            new.append_control(record)


def _copy(
    old: FileLog, new: Log, generation: int, end: RankEnd, operate: Callable[[int, int, Frames], Frames]
) -> dict[tuple[MarkerId, int], RankEnd]:
    """One stream; where it ends at each of its markers."""
    read = [_parse(frame) for _, frame in old.read(LogSpan(generation, end.partition, end.begin, end.end))]
    frames = operate(generation, end.rank, read)
    writer, chain, acks = new.open_writer(generation, end.partition, 0), 0, []
    for seq, (header, payload) in enumerate(frames):
        header.seq, header.chain = seq, chain
        frame = bytearray(HEADER_LEN) + payload
        seal(header, frame)
        chain = header.header_crc
        writer.send(memoryview(frame))
    while len(acks) < len(frames):
        acks += writer.poll(0.2)
    writer.close()
    return {
        (MarkerId(generation, header.marker), end.rank): replace(
            end, begin=acks[0].offset, end=ack.end, frames=header.seq + 1, chain=header.header_crc
        )
        for (header, _), ack in zip(frames, acks, strict=True)
        if header.kind is Kind.MARK
    }


def _parse(frame: memoryview) -> tuple[Header, bytes]:
    header = parse_header(frame)
    return header, bytes(payload_of(header, frame))


def forge_segment(folder: Path, marker: MarkerId, rank: int, table: int, change: Callable[[RowsView], RowsView]) -> int:
    """Change the rows of one table in the first segment of a rank's interval; how many there were."""
    objects = open_store(str(folder))
    lineage = Control(FileLog(folder)).refresh()
    schema = lineage.claims[marker.generation].schema
    manifest = Catalog.load(objects, lineage.job).manifest(marker)
    ref = manifest.segments[rank][0]
    data = objects.read(ref.name)
    front = parse_front(data, ref.name)
    rows, changed = RowSorter(schema), 0
    for entry in entries_of(front.directory):
        view = decode_chunk(entry, data[entry.offset : entry.offset + entry.num_bytes], schema, ref.name)
        if entry.table == table:
            changed += len(view.ids)
            view = change(view)
        rows.add(entry.table, entry.col0, entry.cols, view)
    parts, front_bytes, crc = lay_out(
        front.id, rows.chunks(), last=front.last, schema_crc=front.schema_crc, notes=front.notes, version=2
    )
    text = b"".join(map(bytes, parts))
    (folder / ref.name).write_bytes(text)
    again = parse_front(text, ref.name)
    mended = replace(ref, num_bytes=len(text), front_bytes=front_bytes, header_crc=crc, rows=again.rows)
    segments = list(manifest.segments)
    segments[rank] = (mended, *segments[rank][1:])
    (folder / manifest_name(lineage.job, marker)).write_bytes(replace(manifest, segments=tuple(segments)).to_bytes())
    return changed
