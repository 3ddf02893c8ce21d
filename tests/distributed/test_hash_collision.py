"""Hash ZCH: raw ids, expiry and counters of each row, and rows that evictions reset, on any ranks bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tests import collided, hashed, ranks
from tests.collided import TABLES, State, Truths, attach, go_on, refusal
from tests.hash_zch import FREE, trainable
from tests.hashed import EACH, LRU, SINGLE, evicted, job, whole
from tests.model import differences
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed

CASES: dict[str, dict[str, Any]] = {
    "bag, single TTL eviction": {**SINGLE},
    "sequence, LRU eviction": {"kind": "sequence", **LRU, "track_id_freq": True, "sized": False},
    "bag, TTL eviction by feature": {
        **EACH,
        "opt_in_prob": 70,
        "percent_reserved_slots": 25,
        "optimizer": EmbOptimType.EXACT_SGD,
    },
    "sequence, no eviction": {"kind": "sequence", "max_probe": 2},
}
_MODULES = {"bag": "ManagedCollisionEmbeddingBagCollection", "sequence": "ManagedCollisionEmbeddingCollection"}


def _covering(case: str) -> Any:
    """The case as a parameter, with the cell of docs/coverage.md that it shows."""
    kind, eviction = case.split(", ")
    optimizer = CASES[case].get("optimizer", EmbOptimType.EXACT_ADAGRAD).name
    module = f"{_MODULES[kind]} over hash ZCH, {eviction}"
    cell = {"optimizer": optimizer, "kernel": "fused", "plan": "row-wise", "module": module, "pipeline": "plain"}
    return pytest.param(case, marks=pytest.mark.covers(**cell), id=case.replace(", ", "-").replace(" ", "_"))


@pytest.mark.pitfall(18, 19)
@pytest.mark.parametrize("case", [_covering(case) for case in CASES])
def test_a_marker_and_what_follows_it_come_back_bit_for_bit(case: str, tmp_path: Path) -> None:
    uri, build, marked = f"file://{tmp_path}", CASES[case], [1, 8]
    done = ranks.run(2, hashed.train, uri, marked, 12, build)
    for table, *_ in TABLES:
        happened = [lost for truths in done for lost in evicted(truths, table).items()]
        assert (sum(lost for _, lost in happened) > 10) == ("no eviction" not in case), happened
        assert (sum(lost for step, lost in happened if step > 8) > 1) == ("no eviction" not in case), happened
    for rank, restored in enumerate(ranks.run(2, hashed.restore, uri, marked, 12, build)):
        for first, truths in zip(marked, restored, strict=True):
            assert truths.keys() == set(range(first, 13))
            for step, (state, maps) in truths.items():
                expected, expected_maps = done[rank][step]
                assert differences(expected, state) == [], (first, step)
                assert differences(expected_maps, maps) == [], (first, step)


def _restore_and_go_on(uri: str, last: int, build: dict[str, Any]) -> tuple[State, State, Truths]:
    """The state after the restore, and that of the marker at the end."""
    with trainable() as clock:
        each = job(clock, **build)
        each.step_number = 500
        each.step()
        config = StreamConfig(uri=uri, marker_every=None)
        stateful: dict[str, Any] = {"loader": each}
        with StreamCheckpointer(
            each.dmp, each.optimizer, config=config, stateful=stateful, paranoid=True
        ) as checkpointer:
            assert checkpointer.restore() is not None
            return each.truth(), each.map_truth(), go_on(each, checkpointer, last, [last])


@pytest.mark.covers(plan="row-wise, any ranks whose shards begin at bucket limits", module="hash ZCH", pipeline="plain")
def test_shards_are_cut_and_joined_at_the_limits_of_buckets(tmp_path: Path) -> None:
    """2 ranks, then 1, 4 and 2. Each marker is compared with the live tables."""
    uri, build = f"file://{tmp_path}", {"kind": "sequence", **SINGLE, "track_id_freq": True}
    done = ranks.run(2, hashed.train, uri, [7], 7, build)
    tables, maps = done[0][7][0], whole([truths[7][1] for truths in done])
    for world, last in ((1, 11), (4, 14), (2, 16)):
        restored = ranks.run(world, _restore_and_go_on, uri, last, build)
        for found, _, _ in restored:
            assert differences(tables, found, rng=False) == []
        assert differences(maps, whole([found for _, found, _ in restored])) == []
        assert sum(sum(evicted(truths, table).values()) for *_, truths in restored for table, *_ in TABLES) > 0
        tables, maps = restored[0][2][last][0], whole([truths[last][1] for *_, truths in restored])
    assert (maps["one._hash_zch_identities"] != FREE).any()


def _refused(uri: str, **build: Any) -> str:
    with trainable() as clock:
        each = job(clock, **build)
        each.step()
        return refusal(uri, each)


def _refusals(uri: str) -> dict[str, str]:
    other = collided.job()
    other.step()
    return {
        "probes": _refused(uri, **SINGLE, max_probe=4),
        "hash size": _refused(uri, **SINGLE, sized=False),
        "buckets": _refused(uri, **SINGLE, total_num_buckets=2),
        "policy": _refused(uri),
        "kind": refusal(uri, other),
    }


@pytest.mark.covers(
    module="hash ZCH",
    plan="shards with other buckets",
    outcome="refused",
    why="`the marker has ... buckets of raw ids and this job ...`",
)
def test_maps_that_look_for_raw_ids_elsewhere_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(2, hashed.train, uri, [3], 3, dict(SINGLE))
    said = ranks.run(2, _refusals, uri)[0]
    assert "max_probe is 3 in the marker and 4 in this job" in said["probes"]
    assert "input_hash_size is 4096 in the marker and 0 in this job" in said["hash size"]
    assert "the marker has 4 buckets of raw ids and this job 2" in said["buckets"]
    assert "begins with row 4 there and row 8 here" in said["buckets"]
    assert "reassigned=('mc._embedding_module.one', 'mc._embedding_module.two')" in said["buckets"]
    assert "in the marker and hash_buckets, hash_evicted, hash_hidden, hash_layout, hash_raw_ids in" in said["policy"]
    assert "use the kind of managed collision module of the job that wrote the marker" in said["kind"]
    assert "table=mc._embedding_module.one" in said["kind"]


def _attach_refused(uri: str) -> list[str]:
    said = []
    for change in ("inference", "quotients"):
        with trainable() as clock:
            each = job(clock)
            module: Any = each.maps()["two"]
            if change == "inference":
                module.reset_inference_mode()
            else:
                module.input_mapper._inference_dispatch_div_train_world_size = True
            with pytest.raises(UnsupportedError) as caught:
                attach(each, uri)
            said.append(str(caught.value))
    return said


@pytest.mark.covers(
    module="hash ZCH that was built for inference, or that divides raw ids",
    outcome="refused",
    why="`the hash ZCH module is in inference mode`, `divides raw ids`",
)
def test_modules_without_the_state_of_training_are_refused_at_attach(tmp_path: Path) -> None:
    inference, quotients = ranks.run(1, _attach_refused, f"file://{tmp_path}")[0]
    assert "in inference mode, without the state that training writes" in inference
    assert "divides raw ids" in quotients
    assert "table=mc._embedding_module.two" in quotients
