"""What tests of the file log share."""

from __future__ import annotations

from tests.builders import claim, commit

RECORDS = [claim(1).to_frame(), commit(1, 1).to_frame(), commit(1, 2).to_frame()]
