"""What pyproject.toml cannot say: README.md as a registry shows it, where links into the repository lead nowhere.

They lead to ``Source`` of ``[project.urls]``. As long as there is none, they are their text alone.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")


def registry_page(text: str, source: str | None) -> str:
    """``text`` with every link into the repository leading to ``source``, or as plain text."""

    def link(found: re.Match[str]) -> str:
        if source is not None:
            return f"{found[1]}[{found[2]}]({source.rstrip('/')}/{found[3]})"
        return "" if found[1] else found[2]

    return _LINK.sub(link, text)


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    setup(
        long_description=registry_page((ROOT / "README.md").read_text(), urls.get("Source")),
        long_description_content_type="text/markdown",
    )
