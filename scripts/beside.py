"""Let a venv see the packages of the one that runs this, after its own: beside.py VENV."""

import sys
import sysconfig
from pathlib import Path

here = sysconfig.get_path("purelib")
there = sysconfig.get_path("purelib", vars={"base": sys.argv[1]})
Path(there, "beside.pth").write_text(f"import site; site.addsitedir({here!r})\n")
