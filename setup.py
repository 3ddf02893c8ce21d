"""What pyproject.toml cannot say: README.md as a registry shows it, and the native kernel, which may be missing.

Links into the repository lead to ``Source`` of ``[project.urls]``. As long as there is none, they are their text alone.

The kernel is compiled if a C compiler is found. The wheel is then for this platform, and for all versions of Python,
because the kernel is not an extension of Python.
"""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from sysconfig import get_platform

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")


def registry_page(text: str, source: str | None) -> str:
    """``text`` with every link into the repository leading to ``source``, or as plain text."""

    def link(found: re.Match[str]) -> str:
        if source is not None:
            return f"{found[1]}[{found[2]}]({source.rstrip('/')}/{found[3]})"
        return "" if found[1] else found[2]

    return _LINK.sub(link, text)


class BuildWithKernel(build_py):
    """Compiles the kernel after the modules are in place. Without a compiler, the package is complete without it."""

    def run(self) -> None:
        super().run()
        here = Path("torchrec_stream_ckpt/native")
        kernel = runpy.run_path(str(ROOT / here / "build.py"))
        target = (ROOT if self.editable_mode else Path(self.build_lib)) / here / kernel["LIBRARY"].name
        target.unlink(missing_ok=True)
        if reason := kernel["build"](target):
            self.warn(f"native kernel: {reason}; {kernel['WITHOUT']}")


class OneWheelForAllPythons(bdist_wheel):
    """Tags the wheel by what is in it: for this platform with the kernel, for any platform without."""

    def get_tag(self) -> tuple[str, str, str]:
        compiled = next(Path(self.bdist_dir).glob("**/native/libkernel.so"), None)
        if compiled is None:
            return super().get_tag()
        self.root_is_pure = False  # auditwheel refuses a shared library in a wheel that says it is pure
        return "py3", "none", re.sub(r"[-.]", "_", get_platform())


if __name__ == "__main__":
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    setup(
        long_description=registry_page((ROOT / "README.md").read_text(), urls.get("Source")),
        long_description_content_type="text/markdown",
        cmdclass={"build_py": BuildWithKernel, "bdist_wheel": OneWheelForAllPythons},
    )
