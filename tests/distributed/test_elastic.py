"""``torchrun --nnodes 1:3``: nodes die and come, and the job goes on by itself, each time exactly from a marker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launched import Torchrun, wait
from torchrec_stream_ckpt.util.ports import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

MODEL = ("--num_embeddings_per_feature", "3000,2000,1000,500,300", "--embedding_dim", "32", "--ids_per_lookup", "4")
MODEL += ("--batch_size", "240", "--dense_arch_layer_sizes", "32,32", "--over_arch_layer_sizes", "32,1")
MODEL += ("--learning_rate", "0.05", "--epochs", "1", "--limit_train_batches", "1000000", "--log_every", "1000000")
PARTS = {"table", "fused optimizer", "dense", "dense optimizer", "random", "loader"}


class Cluster:
    """Nodes of one process each on loopback: every agent is a ``torchrun`` of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Torchrun] = []
        self.endpoint = f"127.0.0.1:{free_port()}"

    def add(self) -> Torchrun:
        is_host = int(not self.nodes)  # the first node serves the rendezvous, and it does not die
        conf = f"is_host={is_host},last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=5"
        rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", self.endpoint, "--rdzv_conf", conf]
        elastic = ["--nnodes", "1:3", "--nproc_per_node", "1", "--max_restarts", "20", "--rdzv_id", "elastic"]
        command = [*rendezvous, *elastic, "tests/elastic_rank.py", str(self.folder), *MODEL]
        command += ["--stream_ckpt", f"file://{self.folder / 'ckpt'}"]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the component does; docs/launch.md says why
        node = Torchrun(command, self.folder / f"node-{len(self.nodes)}.log", env)
        self.nodes.append(node)
        return node

    def wait_for_proof(self, world: int, *, after: int, timeout_s: float) -> dict[str, Any]:
        """The first restore behind the ``after`` first ones that was on ``world`` ranks."""

        def found() -> dict[str, Any] | None:
            return next((proof for proof in self.proofs()[after:] if proof["world"] == world), None)

        proof: dict[str, Any] = wait(found, timeout_s, lambda: f"no restart on {world} ranks:\n{self.logs()}")
        return proof

    def wait_for_markers(self, more: int) -> None:
        """Until so many markers have been committed from now on."""
        before = self.logs().count(" committed (step ")

        def found() -> bool:
            return self.logs().count(" committed (step ") >= before + more

        wait(found, 240, lambda: f"no {more} markers more:\n{self.logs()}")

    def proofs(self) -> list[dict[str, Any]]:
        path = self.folder / "proofs"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def logs(self) -> str:
        return "\n".join(f"== node {number}\n{node.text()}" for number, node in enumerate(self.nodes))

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def test_a_job_that_loses_a_node_shrinks_and_grows_again_and_every_restore_is_exact(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        _, _, victim = (cluster.add() for _ in range(3))
        cluster.wait_for_proof(3, after=0, timeout_s=240)
        cluster.wait_for_markers(3)
        seen = len(cluster.proofs())

        victim.kill()
        cluster.wait_for_proof(2, after=seen, timeout_s=240)
        cluster.wait_for_markers(2)
        seen = len(cluster.proofs())

        cluster.add()
        cluster.wait_for_proof(3, after=seen, timeout_s=240)
        cluster.wait_for_markers(2)
    finally:
        cluster.close()

    proofs = [proof for proof in cluster.proofs() if proof["restored"] is not None]
    assert {(proof["was"], proof["world"]) for proof in proofs} >= {(3, 2), (2, 3)}
    for proof in proofs:
        assert proof["differences"] == [], proof
        assert proof["values"].keys() == PARTS
        assert all(proof["values"].values())
    markers = [tuple(proof["restored"]) for proof in proofs]
    assert markers == sorted(markers), "no restart goes back behind the one before"
