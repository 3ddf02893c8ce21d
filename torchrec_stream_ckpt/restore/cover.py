"""How many cells of a table some rectangles cover together: in O(n log n), for a log may name many of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

Rectangle = tuple[int, int, int, int]
"""First row, rows, first column, columns."""


def covered_cells(rectangles: Collection[Rectangle]) -> int:
    """Cells of the union: a line is swept over the rows, and a tree keeps how many columns it meets."""
    edges = sorted({edge for _, _, col0, cols in rectangles for edge in (col0, col0 + cols)})
    columns = _Columns(edges)
    events = sorted(
        event
        for row0, rows, col0, cols in rectangles
        for event in ((row0, 1, col0, col0 + cols), (row0 + rows, -1, col0, col0 + cols))
    )
    cells = row = 0
    for at, change, begin, end in events:
        cells += (at - row) * columns.met
        columns.change(bisect_left(edges, begin), bisect_left(edges, end), change)
        row = at
    return cells


class _Columns:
    """A segment tree over the intervals between ``edges``: how many columns at least one open rectangle has."""

    def __init__(self, edges: list[int]) -> None:
        self._edges = edges
        self._size = max(1, len(edges) - 1)
        self._open = [0] * (4 * self._size)
        """Rectangles that are open over the whole interval of a node, and not over that of its parent."""
        self._met = [0] * (4 * self._size)

    @property
    def met(self) -> int:
        return self._met[1]

    def change(self, begin: int, end: int, by: int, node: int = 1, low: int = 0, high: int | None = None) -> None:
        """Open (+1) or close (-1) a rectangle over the intervals [begin, end)."""
        high = self._size if high is None else high
        if end <= low or high <= begin:
            return
        if begin <= low and high <= end:
            self._open[node] += by
        else:
            middle = (low + high) // 2
            self.change(begin, end, by, 2 * node, low, middle)
            self.change(begin, end, by, 2 * node + 1, middle, high)
        if self._open[node]:
            self._met[node] = self._edges[high] - self._edges[low]
        else:
            self._met[node] = 0 if high - low == 1 else self._met[2 * node] + self._met[2 * node + 1]
