"""Tables whose memory is gone for a while, as TorchRec's memory stashing leaves them inside a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import jobs, ranks
from tests.model import PLAN_1, differences, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError

pytestmark = [pytest.mark.distributed, pytest.mark.pitfall(17)]


def _cut_without_tables(uri: str) -> tuple[str, dict[str, torch.Tensor]]:
    """What the marker says while there are no tables, and the truth at one behind it."""
    job = trainer(PLAN_1)
    # Without the oracle: its view of a CPU table as a NumPy array keeps the table from being freed.
    config = StreamConfig(uri=uri, marker_every=None)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        job.step()
        tables = [
            embedding.emb_module.weights_host
            for lookup in job.dmp.module.ebc._lookups
            for embedding in getattr(lookup, "_emb_modules", ())
        ]
        copies = [(table, table.untyped_storage().size(), table.detach().clone()) for table in tables]
        for table in tables:
            table.untyped_storage().resize_(0)
        with pytest.raises(MarkerFailedError) as caught:
            checkpointer.mark().result(60)
        for table, size, values in copies:
            table.untyped_storage().resize_(size)
            with torch.no_grad():
                table.copy_(values)
        checkpointer.step()
        checkpointer.mark().result(60)
        return str(caught.value), truth(job)


def _restore(uri: str) -> dict[str, torch.Tensor]:
    job = trainer(PLAN_1)
    job.step()
    with jobs.attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job)


def test_a_cut_while_tables_are_freed_fails_by_name_and_loses_nothing(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    said, expected = ranks.run(1, _cut_without_tables, uri)[0]
    assert "memory stashing" in said
    assert "ebc.t_user" in said
    assert differences(expected, ranks.run(1, _restore, uri)[0]) == []
