"""Tables whose memory is gone for a while, as TorchRec's memory stashing leaves them inside a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import jobs, warm
from tests.model import PLAN_1, batch, differences, trainer, truth
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
    said, expected = warm.run(1, _cut_without_tables, uri)[0]
    assert "memory stashing" in said
    assert "ebc.t_user" in said
    assert differences(expected, warm.run(1, _restore, uri)[0]) == []


def _not_resizable(uri: str) -> list[str]:
    """After steps, drains and a marker: the tensors of the user whose memory cannot be given back any more."""
    job = trainer(PLAN_1)
    with StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, drain_every=1)) as checkpointer:
        seen = []
        for _ in range(3):
            dense, features, label = batch(job.step_number + 1)
            seen += [("batch", tensor) for tensor in (dense, features.values(), features.lengths(), label)]
            job.step_number += 1
            job.dmp(dense, features, label).backward()
            job.optimizer.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        seen += list(job.dmp.named_parameters()) + list(job.dmp.named_buffers())
        for lookup in job.dmp.module.ebc._lookups:
            for embedding in getattr(lookup, "_emb_modules", ()):
                seen += [(name, state) for name, state in vars(embedding.emb_module).items() if "_host" in name]
        tensors = [(name, tensor) for name, tensor in seen if isinstance(tensor, torch.Tensor) and tensor.numel()]
        assert len(tensors) > 20
        return [name for name, tensor in tensors if not tensor.untyped_storage().resizable()]


def test_capture_leaves_all_memory_of_the_user_resizable(tmp_path: Path) -> None:
    assert warm.run(1, _not_resizable, f"file://{tmp_path}") == [[]]
