"""What the pages quote of others' papers: ``docs/papers/quotations.json``, and its comparison with the texts.

    python benchmarks/quotations.py --texts FOLDER

By paper: title, machine, and quotations by name, each with its numbers, the place in the text, and a sentence or a
table's row of at most 15 words in which the numbers stand. ``FOLDER`` has the texts, ``NAME.txt`` for each paper of
which more than abstracts is quoted; they are not part of this repository. The tables of the pages take others' numbers
from here (``page_tables/quoted.py``).
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs" / "papers" / "quotations.json"
MOST_WORDS = 15
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:x10\^\{-\d+\})?")


@cache
def papers() -> dict[str, dict[str, Any]]:
    """By name, as the file has them."""
    found: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
    return found


def quoted(paper: str, name: str) -> list[float]:
    """The numbers of one quotation."""
    return [float(each) for each in papers()[paper]["quotes"][name]["numbers"]]


def numbers(sentence: str) -> list[float]:
    """All numbers of a sentence, in their order."""
    return [float(each.replace(",", "").replace("x10^{", "e").rstrip("}")) for each in _NUMBER.findall(plain(sentence))]


def plain(text: str) -> str:
    """Text without what a conversion from PDF has put in: markup, tabs, signs that are not ASCII."""
    for sign, stands_for in (("\u00d7", "x"), ("\\times", "x"), ("\\vert", " "), ("\u201c", '"'), ("\u2019", "'")):
        text = text.replace(sign, stands_for)
    return " ".join(re.sub(r"</?\w+>|[$*\\]", "", text).split()).replace(" ,", ",")


def wrong(texts: Path) -> Iterator[str]:
    """One line for each sentence that its text does not have."""
    for paper, found in papers().items():
        if "abstracts" in found:
            continue
        text = plain((texts / f"{paper}.txt").read_text())
        for name, quote in found["quotes"].items():
            if plain(quote["sentence"]) not in text:
                yield f"{paper}, {name}: the text does not have '{quote['sentence']}'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, metavar="FOLDER")
    found = list(wrong(parser.parse_args().texts))
    print("\n".join(found) or f"{sum(len(each['quotes']) for each in papers().values())} quotations stand in the texts")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
