"""Imports run downward only, and what is heavy or foreign is imported in few places. Read from the source."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torchrec_stream_ckpt

ROOT = Path(torchrec_stream_ckpt.__file__).parent
PACKAGE = "torchrec_stream_ckpt"
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

LEAVES = {
    "errors",
    "types",
    "layout",
    "uris",
    "options",
    "settings",
    "stats",
    "config",
    "metrics",
    "failpoints",
    "locks",
    "units",
    "service",
    "durable",
    "scratch",
    "signal_safe",
    "interpreter_exit",
    "mixing",
    "arguments",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "uris": {"errors"},
    "layout": {"errors", "types", "uris"},
    "config": {"errors", "types", "uris", "options", "settings", "stats"},
    "options": {"errors"},
    "settings": {"errors"},
    "stats": {"types"},
    "metrics": {"errors", "types", "stats", "uris"},
    "arguments": {"errors"},
    "global_samples": {"arguments", "errors", "mixing"},
    "global_batches": {"arguments", "errors", "global_samples"},
    "global_stream": {"arguments", "global_samples"},
    "positions": {"errors", "global_samples"},
    "loader": {"arguments", "errors", "positions"},
    "flags": {"errors", "types", "config", "settings", "evolve"},
    "failpoints": {"errors"},
    **{leaf: set() for leaf in ("interpreter_exit", "locks", "mixing", "signal_safe")},
    "scratch": {"locks"},
    "service": {"errors"},
    "durable": set(),
    "units": {"errors"},
    "adapter": {"errors", "types", "adapter"},
    "format": LEAVES | {"format"},
    "evolve": {"errors", "types", "units", "format", "evolve"},
    "log": LEAVES | {"format", "log"},
    "store": LEAVES | {"format", "store"},
    "proving": {"types", "format", "adapter"},
    "capture": LEAVES | {"format", "adapter", "capture", "proving"},
    "control": LEAVES | {"format", "log", "store", "control"},
    "commit": LEAVES | {"format", "evolve", "adapter", "log", "store", "control", "commit"},
    "route": LEAVES | {"format", "log", "store", "control", "route"},
    "proofs": LEAVES | {"format", "store", "route", "proofs"},
    "restore": LEAVES | {"format", "evolve", "adapter", "log", "store", "proofs", "restore", "proving", "route"},
    "engine": LEAVES | {"format", "log", "store", "engine", "__init__"},
    "materialize": LEAVES | {"format", "log", "store", "route", "proofs", "engine", "materialize"},
    "interchange": LEAVES
    | {"format", "evolve", "adapter", "log", "store", "control", "commit", "restore", "materialize", "interchange"}
    | {"proofs", "route"},
    "tiers": LEAVES | {"format", "log", "store", "control", "commit", "route", "restore", "tiers"},
    "follower": LEAVES
    | {"format", "log", "store", "control", "proofs", "route", "restore", "materialize", "interchange", "follower"},
    "trainer": LEAVES
    | {"format", "evolve", "adapter", "capture", "log", "control", "commit", "route", "restore", "proving", "tiers"}
    | {"proofs", "trainer"},
    "trainer/calls": {"errors", "commit"},
    "trainer/attached": LEAVES | {"format", "adapter", "capture", "commit"},
    "trainer/cuts": LEAVES | {"format", "capture", "log", "commit", "proving"},
    "trainer/drains": LEAVES | {"format", "capture", "log", "commit"},
    "trainer/session": LEAVES
    | {"format", "evolve", "adapter", "log", "store", "control", "commit", "proofs", "route", "restore", "tiers"}
    | {"trainer"},
    "trainer/finder": LEAVES | {"format", "log", "store", "commit", "route", "tiers"},
    "trainer/evolving": LEAVES | {"format", "evolve", "commit", "route"},
    "trainer/signals": LEAVES,
    "trainer/standby": LEAVES | {"format", "log", "control", "commit", "restore", "route", "trainer"},
    "trainer/checking": LEAVES | {"format", "adapter", "commit", "proofs", "proving", "restore", "store"},
    "trainer/dense_checking": LEAVES | {"format", "commit", "proofs"},
    "trainer/groups": LEAVES | {"commit"},
    "trainer/remarks": LEAVES | {"format", "commit", "route", "store"},
    "trainer/telemetry": LEAVES | {"format", "capture", "log"},
    "trainer/showing": LEAVES | {"commit", "trainer"},
    "checkpointer": LEAVES
    | {"loader", "format", "evolve", "capture", "commit", "route", "restore", "tiers", "trainer"},
    "planner": LEAVES | {"format", "evolve", "route"},
    "tnt": {"checkpointer", "errors", "loader", "types"},
    "broker": {"errors", "broker"},
    "reporting": LEAVES | {"format", "log", "store", "proofs", "route", "reporting"},
    "sizing": LEAVES | {"format", "sizing"},
    "cli": LEAVES
    | {
        "flags",
        "format",
        "log",
        "store",
        "control",
        "commit",
        "proofs",
        "route",
        "restore",
        "engine",
        "materialize",
        "interchange",
        "follower",
        "broker",
        "sizing",
        "evolve",
        "reporting",
        "tiers",
        "cli",
        "__init__",
    },
    "__main__": {"cli"},
    "__init__": {"config", "errors", "types", "loader", "checkpointer", "planner", "follower", "evolve", "interchange"}
    | {"global_batches", "global_samples", "global_stream"},
}
"""Room or module -> what it may import of this package. A file of a room may have a narrower rule of its own."""

CLIENT_OF_KAFKA = {
    f"log/kafka/{role}.py" for role in ("brokers", "client", "control_topic", "log", "producer", "reader", "topics")
}

# What needs torch: everything else must run where there is none.
WITH_TORCH = frozenset(
    {
        *(source for source in SOURCES if source.startswith("adapter/")),
        "capture/counts.py",
        "capture/device_areas.py",
        "capture/frozen.py",
        "capture/sender.py",
        "capture/hook.py",
        "capture/oracle.py",
        "capture/outside_writes.py",
        "capture/prover.py",
        "capture/rowmask.py",
        "capture/sender.py",
        "capture/shards.py",
        "capture/staging.py",
        "capture/touched.py",
        "capture/touched.py",
        "capture/hook.py",
        "checkpointer.py",
        "dense/buffer_memory.py",
        "dense/buffers.py",
        "save/cadence.py",
        "ranks/collective.py",
        "dense/comm_hooks.py",
        "dense/rank_agreement.py",
        "dense/canonical.py",
        "save/coordinator.py",
        "dense/data_parallel.py",
        "dense/dcp.py",
        "dense/dense_state.py",
        "dense/dense_digests.py",
        "dense/dense_guard.py",
        "dense/loaded_digests.py",
        "dense/dense_loader.py",
        "dense/dense_prover.py",
        "dense/exact_pickle.py",
        "dense/extra_state.py",
        "dense/gradient_loader.py",
        "dense/gradients.py",
        "dense/stateful_objects.py",
        "dense/hyperparameters.py",
        "dense/id_maps.py",
        "dense/live_dense.py",
        "dense/entry_matching.py",
        "dense/optimizer_memory.py",
        "dense/optimizer_state.py",
        "dense/saved_dense.py",
        "dense/random_state.py",
        "dense/replica_check.py",
        "dense/replicas.py",
        "ranks/liveness.py",
        "dense/schedules.py",
        "dense/tree.py",
        "extras/follower/tables.py",
        "extras/interchange/contents.py",
        "extras/interchange/contents.py",
        "extras/interchange/dcp.py",
        "extras/interchange/dcp_checkpoint.py",
        "extras/interchange/dcp_dense.py",
        "extras/interchange/dcp_entries.py",
        "extras/interchange/dcp_reader.py",
        "extras/interchange/dcp_reader.py",
        "extras/interchange/dense_state.py",
        "extras/interchange/dense_state.py",
        "extras/interchange/importing.py",
        "extras/interchange/torch_checkpoint.py",
        "extras/interchange/torch_file.py",
        "planner.py",
        "proving.py",
        "global_samples.py",
        "global_stream.py",
        "positions.py",
        "restore/apply.py",
        "restore/proof_check.py",
        "restore/from_log.py",
        "restore/from_store.py",
        "restore/from_store.py",
        "restore/row_writers.py",
        "restore/target.py",
        "extras/tiers/job.py",
        "capture/attached_model.py",
        "job/startup.py",
        "ranks/exclusive_calls.py",
        "restore/proof_check.py",
        "restore/finder.py",
        "save/claims.py",
        "save/rank_cut.py",
        "restore/dense_proof_check.py",
        "save/rank_cut.py",
        "save/generation_end.py",
        "restore/model_change.py",
        "restore/finder.py",
        "ranks/collective.py",
        "save/marker_notes.py",
        "job/startup.py",
        "restore/session.py",
        "save/metrics_export.py",
        "job/standby.py",
        "save/stop_requests.py",
        "save/stream.py",
        "save/streaming.py",
        "save/telemetry.py",
        "tnt.py",
    }
)


@cache
def tree(source: str) -> ast.Module:
    return ast.parse(SOURCES[source].read_text())


@cache
def imports(source: str) -> frozenset[str]:
    """Absolute dotted names that a file imports, inside functions too; ``from a import b`` gives ``a.b``."""
    found: set[str] = set()
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def room(source: str) -> str:
    """``log/files.py`` is in ``log``, ``layout.py`` in ``layout``."""
    return source.split("/")[0].removesuffix(".py")


def importers(library: str) -> set[str]:
    """Files that import ``library`` or something in it."""
    return {source for source in SOURCES if any(f"{name}.".startswith(f"{library}.") for name in imports(source))}


def ours(source: str) -> Iterator[str]:
    """First component below the package of everything of ours that a file imports."""
    for name in imports(source):
        parts = name.split(".")
        if parts[0] == PACKAGE and len(parts) > 1:
            yield parts[1] if (ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists() else "__init__"


def test_the_package_was_found() -> None:
    assert {"model/kernels.py", "format/frame.py", "log/files.py", "log/control/partition.py"} <= SOURCES.keys()
    assert "torch.distributed" in imports("checkpointer.py")


def test_imports_run_downward() -> None:
    for source in SOURCES:
        assert room(source) in MAY_IMPORT, f"decide what this new room may import: {source}"
        rule = MAY_IMPORT.get(source.removesuffix(".py"), MAY_IMPORT[room(source)])
        assert set(ours(source)) - rule == set(), source


def test_fbgemm_is_known_to_the_adapter_alone() -> None:
    assert {room(source) for source in importers("fbgemm_gpu")} == {"adapter"}


def test_of_torchrec_others_know_the_constraints_of_its_planner_only() -> None:
    assert {room(source) for source in importers("torchrec")} == {"adapter", "planner"}
    (constraints,) = (name for name in imports("planner.py") if name.startswith("torchrec."))
    assert constraints == "torchrec.distributed.planner.types.ParameterConstraints"


def test_private_names_of_torch_and_torchrec_are_imported_by_the_adapter_alone() -> None:
    libraries = ("torch.", "torchrec.", "fbgemm_gpu.")
    private = {
        source
        for source in SOURCES
        for name in imports(source)
        if name.startswith(libraries) and any(part.startswith("_") for part in name.split("."))
    }
    assert {room(source) for source in private} <= {"adapter"}


def test_the_kafka_client_stays_in_its_modules() -> None:
    assert importers("confluent_kafka") == CLIENT_OF_KAFKA


def test_fsspec_stays_in_its_module_and_no_file_system_of_it_is_imported_by_name() -> None:
    assert importers("fsspec") == {"store/remote.py"}
    assert importers("s3fs") | importers("botocore") | importers("aiobotocore") == set()


def test_ray_is_imported_by_its_engine_alone_when_it_is_used() -> None:
    assert importers("ray") == set(), "by name: maintain/engine/on_ray.py asks importlib"
    assert [source for source in SOURCES if '"ray"' in SOURCES[source].read_text()] == [
        "maintain/engine/choose.py",
        "maintain/engine/on_ray.py",
    ]


def test_the_client_of_prometheus_stays_in_its_module() -> None:
    assert importers("prometheus_client") == {"metrics.py"}


def test_torchtnt_is_imported_by_its_callback_alone() -> None:
    assert importers("torchtnt") == {"tnt.py"}


def test_tensorboard_is_imported_where_scalars_are_written() -> None:
    assert importers("torch.utils.tensorboard") == {"save/metrics_export.py"}


def test_process_groups_stay_where_ranks_talk() -> None:
    # Post-local SGD is an optimizer that stands there; its group is its own.
    others = {"restore/apply.py", "model/wrappers.py"}
    for source in importers("torch.distributed"):
        assert room(source) in ("commit", "checkpointer", "interchange") or source in others
    of_checkpoints = ("torch.distributed.checkpoint.",)
    for source in (source for source in importers("torch.distributed") if room(source) == "interchange"):
        assert all(name.startswith(of_checkpoints) for name in imports(source) if name.startswith("torch.distributed"))


def test_private_names_of_a_checkpointer_are_known_to_one_file_of_the_tests_alone() -> None:
    """``tests/inside.py``: others ask there, so that parts can move."""
    holders = ("checkpointer", "_checkpointer", "ours", "running")
    may_know = re.compile(rf"({'|'.join(holders)})[\s)\\]*\.\s*_")  # parsing what cannot takes two seconds
    for folder in ("tests", "benchmarks", "recipes", "scripts"):
        for path in sorted((ROOT.parent / folder).rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(ast.parse(text)) if may_know.search(text) else ():
                if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                    continue
                held = getattr(node.value, "attr", getattr(node.value, "id", ""))
                assert held not in holders or path.name == "inside.py", f"{path}:{node.lineno} knows {node.attr}"


def test_no_file_has_more_than_450_lines() -> None:
    project = ROOT.parent
    folders = ("torchrec_stream_ckpt", "torchx_components", "recipes", "scripts", "benchmarks", "tests")
    long = {
        f"{path.relative_to(project)}: {lines}"
        for path in (path for folder in folders for path in (project / folder).rglob("*.py"))
        if (lines := path.read_bytes().count(b"\n")) > 450
    }
    assert long == set(), "split them by what they do, or show"


def test_torch_is_imported_where_tensors_are_alone() -> None:
    assert importers("torch") <= WITH_TORCH


def test_what_the_extra_export_brings_is_imported_by_its_format_alone() -> None:
    assert importers("pyarrow") == {"extras/interchange/parquet.py"}
    assert importers("safetensors") == set()


def test_a_moment_becomes_text_in_one_place_which_knows_that_a_record_may_say_any_number() -> None:
    asked = re.compile(r"\b(strftime|gmtime|localtime|fromtimestamp)\b")
    assert {source for source, path in SOURCES.items() if asked.search(path.read_text())} == {"units.py"}


def test_tasks_and_the_users_objects_alone_are_pickled() -> None:
    """Tasks on their way to a worker of the same version; what ``torch.save`` pickles for a blob of the dense state."""
    assert importers("pickle") == {"maintain/engine/parcel.py", "dense/exact_pickle.py"}


def modules() -> list[str]:
    """Every module that must run without torch, but for those of a client library."""
    clients = CLIENT_OF_KAFKA | {"store/remote.py"}
    light = [source for source in SOURCES if source not in WITH_TORCH | clients]
    return [f"{PACKAGE}/{source}".removesuffix(".py").removesuffix("/__init__").replace("/", ".") for source in light]


def test_logs_plans_and_the_command_line_import_without_torch() -> None:
    program = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
early = sorted(sys.modules)
import torchrec_stream_ckpt.log.kafka.log
import torchrec_stream_ckpt.store.remote
print(json.dumps([early, sorted(sys.modules)]))
"""
    names = modules()
    assert f"{PACKAGE}.cli.main" in names
    assert f"{PACKAGE}.broker.kraft" in names
    assert {f"{PACKAGE}.{name}" for name in ("restore.plan", "route.find", "restore.reshard")} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = (set(found) for found in json.loads(done.stdout.splitlines()[-1]))
    assert after & {"torch", "torchrec", "fbgemm_gpu"} == set()
    assert {"confluent_kafka", "fsspec", "prometheus_client"} & before == set()
    assert {"confluent_kafka", "fsspec"} <= after


def test_what_the_training_thread_may_wait_for_is_never_left_locked_by_a_signal() -> None:
    rooms = ("adapter", "capture", "commit", "format", "log", "trainer")
    made = re.compile(r"(threading\.(Condition|Event|Semaphore|Barrier)|\bFuture|\bQueue)\(")
    found = [name for name, path in SOURCES.items() if name.startswith(rooms) and made.search(path.read_text())]
    assert found == []


def test_no_two_classes_share_a_name() -> None:
    """One noun for one thing, and one thing for one noun."""
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
