"""Names of tables in little room."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console

from torchrec_stream_ckpt.cli.common import plain


def short_names(console: Console, names: Sequence[str]) -> list[str]:
    """The names as a column of a table shows them, escaped; what all of them begin with is said once, above.

    Nothing is taken off where the longest name fits into a third of the console.
    """
    prefix = ""
    if len(names) > 1 and max(map(len, names)) > console.width // 3:
        first, last = min(names), max(names)
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
        prefix = first[: max(first.rfind(each, 0, alike) for each in "._/-") + 1]
    if prefix:
        console.print(f"each table's name begins with {plain(prefix)}", soft_wrap=True)
    return [plain(name.removeprefix(prefix)) for name in names]
