"""Names of tables in little room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console

from torchrec_stream_ckpt.cli.common import plain

_CUT = "..."


def short_names(console: Console, names: Sequence[str]) -> list[str]:
    """The names as a column of a table shows them, escaped; what all of them begin with is said once, above.

    Nothing is taken off where the longest name fits into a third of the console. What then is longer still is cut in
    its middle, unless two names would look the same; ``--width`` makes room for all of it, and a pipe has it.
    """
    room = console.width // 3
    prefix = ""
    if len(names) > 1 and max(map(len, names)) > room:
        first, last = min(names), max(names)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        prefix = first[: max(first.rfind(each, 0, alike) for each in "._/-") + 1]
    if prefix:
        console.print(f"each table's name begins with {plain(prefix)}", soft_wrap=True)
    rest = [name.removeprefix(prefix) for name in names]
    cut = [_cut(name, room) for name in rest]
    if len(rest) > 1 and cut != rest and len(set(cut)) == len(set(rest)):
        console.print(f"names longer than {room} characters are cut: --width shows more of them", soft_wrap=True)
        rest = cut
    return [plain(name) for name in rest]


def _cut(name: str, room: int) -> str:
    """The begin and the end of a name that has no room."""
    if len(name) <= room:
        return name
    front = (room - len(_CUT)) // 2
    return name[:front] + _CUT + name[len(name) - (room - len(_CUT) - front) :]
