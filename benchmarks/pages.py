"""Write the tables of the pages out of the filed results: ``make bench-pages``.

    python benchmarks/pages.py [--check]

A table stands in a page between two comments, ``<!-- figures: NAME WORDS -->`` and ``<!-- end -->``; what is between
them is written anew. ``page_tables`` has one function for each name, which gets the words. No page is touched whose
tables are as they should be.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from page_tables import TABLES
from page_tables.results import NotFiledError, Table

ROOT = Path(__file__).resolve().parents[1]
_MARKED = re.compile(r"(<!-- figures: ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S)
_COMMENTS = (re.compile(r"<!--\s*figures"), re.compile(r"<!--\s*end\b"))


def pages() -> Iterator[Path]:
    """All that may have tables."""
    for pattern in ("README.md", "docs/**/*.md", "benchmarks/**/README.md"):
        yield from sorted(ROOT.glob(pattern))


def lines(table: Table) -> str:
    """As Markdown, between empty lines."""
    head, *rows = table
    if wrong := [row for row in rows if len(row) != len(head)]:
        raise ValueError(f"{len(head)} columns, but a row has {len(wrong[0])}: {wrong[0]}")
    whole = ([" ".join(cell.split()).replace("|", r"\|") for cell in cells] for cells in (head, *rows))
    text = ["| " + " | ".join(cells) + " |" for cells in whole]
    text.insert(1, "|---" * len(head) + "|")
    return "\n" + "".join(f"{line}\n".replace("|  |", "| |").replace("|  |", "| |") for line in text) + "\n"


def written(page: Path) -> str:
    """The page, its tables as the filed results have them."""
    text = page.read_text()
    _check_comments(page, text)

    def table(found: re.Match[str]) -> str:
        begin, words, _, end = found.groups()
        name, *rest = words.split()
        if name not in TABLES:
            raise SystemExit(f"Error: {page}: no table '{name}'. Try: {', '.join(TABLES)}")
        try:
            bound = signature(TABLES[name]).bind(page, *rest)
        except TypeError as error:
            raise SystemExit(f"Error: {page}: table '{words}': its words: {error}") from None
        try:
            return begin + lines(TABLES[name](*bound.args)) + end
        except NotFiledError as error:
            raise SystemExit(f"Error: {page}: table '{words}': {error}") from None
        except LookupError as error:
            said = f"a result that it is made of has no {error}; was that measured?"
            raise SystemExit(f"Error: {page}: table '{words}': {said} Try: keep the result before it") from None

    return _MARKED.sub(table, text)


def _check_comments(page: Path, text: str) -> None:
    """Each begin has its end: a table that is not found is not compared, one without an end takes the next along."""
    tables = len(_MARKED.findall(text))
    begins, ends = (len(each.findall(text)) for each in _COMMENTS)
    if begins != tables or ends != tables:
        said = f"{tables} tables, but {begins} comments begin one and {ends} end one"
        raise SystemExit(f"Error: {page}: {said}. Try: '<!-- figures: NAME WORDS -->' on a line, then '<!-- end -->'")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not as it should be")
    check = parser.parse_args().check
    stale = [page for page in pages() if written(page) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'differs from the filed results' if check else 'written'}")
        if not check:
            page.write_text(written(page))
    if stale and check:
        raise SystemExit("Try: make bench-pages")


if __name__ == "__main__":
    main()
