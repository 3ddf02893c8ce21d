"""Check the language of docstrings and messages: python scripts/language.py [FOLDER ...]

A docstring begins with a verb or a noun phrase that can stand alone. It names things by the words of docs/glossary.md.
An error, a hint and a log line do not use words that a native speaker would not say of software.
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

MESSAGE_WORDS = re.compile(
    r"\b(anew|nobody|tells?|told|heard|hears?|these very|that very|beside|made again|stands? (?:in|on|at|where)"
    r"|of (?:its|their) own|leave (?:it|them|one of them)? ?(?:out|away)|(?:is|are) none|(?:goes|go|went) on)\b"
)
LOGGERS = frozenset({"log", "_log", "logger"})


def docstrings(source: str) -> Iterator[tuple[range, str]]:
    """Yield (lines, text) of the docstrings of modules, classes, functions and attributes: strings that stand alone."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield range(node.lineno, (node.end_lineno or node.lineno) + 1), text


def messages(source: str) -> Iterator[tuple[range, str]]:
    """Yield (lines, text) of the parts of errors, hints and log lines: literals in calls, and constants named HINT."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name.endswith("Error"):
                told = [*args, *(each.value for each in node.keywords if each.arg == "hint")]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=args) if name in LOGGERS:
                told = args
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name.lower().endswith(("hint", "hints", "causes")):
                told = [value]
            case _:
                continue
        for part in (part for each in told for part in ast.walk(each)):
            match part:
                case ast.Constant(value=str(text)):
                    yield range(part.lineno, (part.end_lineno or part.lineno) + 1), text


def complaints(text: str) -> Iterator[str]:
    """Yield one sentence for each rule that a docstring breaks."""
    if opening := OPENINGS.match(text):
        yield f"begins with '{opening[1]}': begin with a verb, or name the thing"
    for word in WORDS.findall(text):
        yield f"has '{word}': use the word of the glossary"


def message_complaints(text: str) -> Iterator[str]:
    """Yield one sentence for each word that a part of a message must not have."""
    for word in MESSAGE_WORDS.findall(text):
        yield f"a message has '{word}': name the subject and what is wrong, then the fix"


def main(folders: list[str]) -> int:
    """Print the complaints; the exit status."""
    found = 0
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            source, name = path.read_text(), path.relative_to(ROOT).as_posix()
            said = [(lines.start, each) for lines, text in docstrings(source) for each in complaints(text)]
            if name.startswith("torchrec_stream_ckpt/"):
                said += [(lines.start, each) for lines, text in messages(source) for each in message_complaints(text)]
            for line, complaint in said:
                print(f"{name}:{line}: {complaint}")
            found += len(said)
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
