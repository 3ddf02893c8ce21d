"""Check the openings and words of docstrings: python scripts/language.py [FOLDER ...]

A docstring begins with a verb or a noun phrase that can stand alone. It names things by the words of docs/glossary.md.
Prints each that does not, with its place, and ends with status 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("torchrec_stream_ckpt", "recipes", "torchx_components")
OPENINGS = re.compile(r"\s*(Of|That of|That|Those|What|Whether|Tell whether|How|Which|As there|None:)\b")
WORDS = re.compile(r"\b(anew(?!:)|as far as names tell|these very|that very|(?:is|are|was|were) (?:told|met|said))\b")


def docstrings(source: str) -> Iterator[tuple[range, str]]:
    """Yield (lines, text) of the docstrings of modules, classes, functions and attributes: strings that stand alone."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield range(node.lineno, (node.end_lineno or node.lineno) + 1), text


def complaints(text: str) -> Iterator[str]:
    """Yield one sentence for each rule that a docstring breaks."""
    if opening := OPENINGS.match(text):
        yield f"begins with '{opening[1]}': begin with a verb, or name the thing"
    for word in WORDS.findall(text):
        yield f"has '{word}': use the word of the glossary"


def main(folders: list[str]) -> int:
    """Print the complaints; the exit status."""
    found = 0
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            for lines, text in docstrings(path.read_text()):
                for complaint in complaints(text):
                    print(f"{path.relative_to(ROOT)}:{lines.start}: {complaint}")
                    found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
