"""The documentation site: what mkdocs asks while it builds. `make docs` runs it; mkdocs.yml names it as its hook.

The site shows the repository's own Markdown at the places where it lies, README.md as the start page, so that each
relative link means the same in a clone and on the site. Files that a page links to and that are no pages go onto the
site as they are. What is wrong is a warning, and warnings fail the build (``strict``): a broken link, a public name
without a docstring, a page that would make a browser fetch something from elsewhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

log = logging.getLogger("mkdocs.plugins.site")

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/*/*.md", "benchmarks/README.md", "benchmarks/*/README.md")
MADE = ROOT / "build" / "reference"
"""Where scripts/reference_pages.py has written the pages that are made from the code."""
LISTED = "torchrec_stream_ckpt"
"""The package; what its ``__all__`` lists is public, and so are the modules that follow."""
MODULES = ("errors", "flags", "tnt")
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:class|func|meth|data|mod|attr):(?=<code>)")
_FETCHED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?https?:|<link\b[^>]*\bhref=[\"']?https?:[^>]*>")
_ALLOWED = re.compile(r"rel=[\"']?(?:canonical|next|prev|icon)\b")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages of the repository at their own places, and what they link to."""
    pages = {path.relative_to(ROOT).as_posix(): path for pattern in PAGES for path in sorted(ROOT.glob(pattern))}
    pages |= {f"docs/reference/{path.name}": path for path in sorted(MADE.glob("*.md"))}
    linked: dict[str, Path] = {place: ROOT / place for place in config.extra_css if (ROOT / place).is_file()}
    for place, path in pages.items():
        for target in _targets(path.read_text()):
            file = (ROOT / place).parent.joinpath(target).resolve()
            if file.is_file() and file.is_relative_to(ROOT):
                linked[file.relative_to(ROOT).as_posix()] = file
    kept = [file for file in files if not (ROOT / "docs" / file.src_uri).exists()]
    ours = [File.generated(config, place, abs_src_path=str(path)) for place, path in (linked | pages).items()]
    return Files([*kept, *ours])


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Every benchmark is in the navigation, without a list of them that somebody forgets."""
    found = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob(PAGES[-1]))]
    next(part for part in config.nav or () if "Benchmarks" in part)["Benchmarks"] += found
    return config


def on_pre_build(config: MkDocsConfig) -> None:
    """Every public name has a docstring."""
    for name in undocumented():
        log.warning("%s is public and has no docstring", name)


def on_page_content(html: str, **_: Any) -> str:
    """Roles of Sphinx, which docstrings have, mean nothing here."""
    return _ROLE.sub("", html)


def on_post_build(config: MkDocsConfig) -> None:
    """The site needs nothing that is not in it."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        for tag in _FETCHED.findall(page.read_text()):
            if not _ALLOWED.search(tag):
                log.warning("%s would fetch %s", page.relative_to(config.site_dir), tag)


def undocumented() -> list[str]:
    """Dotted names of the public API that have no docstring."""
    package = griffe.load(LISTED, search_paths=[ROOT], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    listed: list[Any] = [package[str(name)] for name in package.exports or ()]
    public = [each.final_target if each.is_alias else each for each in listed]
    for module in MODULES:
        public += [package[module], *(each for each in _own(package[module]) if each.name != "log")]
    return sorted({name for each in public for name in _bare(each)})


def _bare(found: Any) -> Iterator[str]:
    if not found.has_docstring:
        yield found.path
    if found.is_class:
        for member in _own(found):
            yield from _bare(member)


def _own(holder: Any) -> Iterator[Any]:
    """Members that a module or class defines itself, under a name that is not private."""
    for name, member in holder.members.items():
        if not name.startswith("_") and not member.is_alias:
            yield member


def _targets(text: str) -> Iterator[str]:
    for target, _ in _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.S)):
        if not re.match(r"[a-z]+:", target):
            yield target
