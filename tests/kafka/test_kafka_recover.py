"""A lost log comes back in new topics; a Kafka job whose topics were deleted does not begin anew."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import stores
from tests.tables import FIRST, write_tables
from tests.unit.test_interchange import SCHEMA, values
from torchrec_stream_ckpt.cli.main import app
from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.log.api import open_log

pytestmark = pytest.mark.kafka


def test_the_markers_of_a_store_come_back_in_new_topics(bootstrap: str, tmp_path: Path) -> None:
    write_tables(tmp_path / "job", SCHEMA, values())
    stores.fold(tmp_path / "job")
    uri = f"kafka://{bootstrap}/recovered-{uuid.uuid4().hex[:8]}"
    arguments = ["recover", uri, "--store", str(tmp_path / "job"), "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(done.stdout)["offered"] == [str(FIRST)]
    log = open_log(uri)
    lineage = Control(log).refresh()
    assert list(lineage.commits) == [FIRST]
    assert lineage.spans(1, lineage.find(FIRST).ranks) == []
    assert json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).stdout)["appended"] == 0
    target = f"parquet://{tmp_path}/out"
    CliRunner().invoke(app, ["export", uri, "--store", str(tmp_path / "job"), "--to", target], catch_exceptions=False)
    assert len(list((tmp_path / "out").iterdir())) == len(SCHEMA.tables)
    log.append_control(lineage.claims[1].to_frame())
    log.close()
    with pytest.raises(ConfigError, match="not empty"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
