"""Every error that users can meet has its section."""

from __future__ import annotations

import re
from pathlib import Path

from torchrec_stream_ckpt import errors

DOC = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


def test_every_error_class_has_a_section_and_no_other_has() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.StreamCkptError) and value is not errors.StreamCkptError
    }
    assert set(re.findall(r"^## (\w+)$", DOC, re.M)) == classes
