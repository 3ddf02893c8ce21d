"""Count lines of code, without docstrings, comments and empty lines: for each district of the package, and the rest.

python scripts/size.py [FOLDER ...]
"""

from __future__ import annotations

import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from language import docstrings

ROOT = Path(__file__).parents[1]
PACKAGE = "torchrec_stream_ckpt"
FOLDERS = (PACKAGE, "torchx_components", "recipes", "scripts", "benchmarks", "tests")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
NO_CODE |= {tokenize.ENDMARKER}


def count(source: str) -> int:
    """Lines that hold code. A string that stands alone is a docstring, of an attribute too."""
    documented = {line for each, _ in docstrings(source) for line in each}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def main(folders: list[str]) -> None:
    sizes: Counter[str] = Counter()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT)
            if any((ROOT / each).is_symlink() for each in name.parents):
                continue
            deep = name.parts[0] == PACKAGE and len(name.parts) > 2
            sizes["/".join(name.parts[: 1 + deep])] += count(path.read_text())
    for place, size in sizes.most_common():
        print(f"{size:7,} {place}")
    for folder in folders:
        print(f"{sum(size for place, size in sizes.items() if place.split('/')[0] == folder):7,} {folder}, all")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FOLDERS))
