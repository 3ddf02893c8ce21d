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
from tests import parts
from torchrec_stream_ckpt import inner

ROOT = Path(torchrec_stream_ckpt.__file__).parent
PACKAGE = "torchrec_stream_ckpt"
SOURCES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

DISTRICTS: dict[str, str] = {
    "errors": "",
    "util": "",
    "native": "",
    "format": "native",
    "loaders": "",
    "flags": "evolve",
    "evolve": "format",
    "model": "format",
    "log": "format log/bucket log/kafka",
    "log/bucket": "format log store",
    "log/kafka": "format log",
    "store": "format",
    "log/control": "format log store",
    "ranks": "log",
    "capture": "format model native ranks",
    "dense": "evolve format log model native ranks",
    "find": "format log log/control store",
    "proofs": "find format store",
    "restore": "capture dense evolve find format log model native proofs ranks store",
    "save": "capture dense find format log log/control native ranks store",
    "tiers": "find format log log/control ranks save store",
    "job": "evolve find format log log/control ranks restore save",
    "verify": "find format log proofs restore store",
    "maintain": "find format log maintain/engine proofs store",
    "maintain/engine": "log store",
    "maintain/scrub": "find format maintain store",
    "maintain/gc": "find format log maintain maintain/scrub store",
    "maintain/recover": "find format log log/control store",
    "read": "find format log maintain proofs store",
    "maintain/materialize_service": "format maintain maintain/scrub proofs",
    "inner": "dense evolve find log log/control model proofs read restore save store tiers",
    "extras/broker": "",
    "extras/sizing": "format",
    "extras/planner": "evolve format inner",
    "extras/reporting": "format inner",
    "extras/interchange": "evolve format inner",
    "extras/tiers": "format inner",
    "extras/follower": "extras/interchange format inner",
    "script": "",
    "checkpointer": "capture dense evolve extras/tiers find format job loaders ranks restore save tiers",
    "tnt": "checkpointer loaders",
    "__init__": "checkpointer evolve extras/follower extras/interchange extras/planner loaders script",
    "cli": "__init__ dense evolve extras/broker extras/follower extras/interchange extras/reporting extras/sizing "
    "extras/tiers find flags format inner log log/control maintain maintain/engine maintain/gc "
    "maintain/materialize_service maintain/recover maintain/scrub native proofs restore save store verify",
    "__main__": "cli",
}
"""District -> the districts that it may import, apart from itself, ``errors`` and ``util``.

A folder of the package, or a module that stands for itself. The longest name that fits a file is its district.
"""
ONE_WAY_BUT_FOR = {("log", "log/bucket"), ("log", "log/kafka")}
"""``open_log`` opens a log of any kind; otherwise no two districts lead to each other."""

CLIENT_OF_KAFKA = {
    f"log/kafka/{role}.py"
    for role in ("arrivals", "brokers", "client", "clocks", "control_topic", "log", "producer", "reader", "topics")
}

# What may import torch: everything else must run where it is not installed.
WITH_TORCH = (
    "capture/",
    "checkpointer.py",
    "dense/",
    "extras/follower/followed_maps.py",
    "extras/follower/model.py",
    "extras/follower/replica.py",
    "extras/follower/tables.py",
    "extras/interchange/contents.py",
    "extras/interchange/dcp.py",
    "extras/interchange/dcp_checkpoint.py",
    "extras/interchange/dcp_dense.py",
    "extras/interchange/dcp_entries.py",
    "extras/interchange/dcp_reader.py",
    "extras/interchange/dense_state.py",
    "extras/interchange/id_map.py",
    "extras/interchange/importing.py",
    "extras/interchange/torch_checkpoint.py",
    "extras/interchange/torch_file.py",
    "extras/planner.py",
    "job/",
    "loaders/",
    "model/",
    "ranks/collective.py",
    "ranks/exclusive_calls.py",
    "ranks/liveness.py",
    "restore/apply.py",
    "restore/model_change.py",
    "restore/proof_check.py",
    "restore/regions.py",
    "restore/session.py",
    "restore/target.py",
    "save/cadence.py",
    "save/claims.py",
    "save/coordinator.py",
    "save/generation_end.py",
    "save/import_writer.py",
    "save/marker_notes.py",
    "save/metrics_export.py",
    "save/rank_cut.py",
    "save/stop_requests.py",
    "save/stream.py",
    "save/streaming.py",
    "save/telemetry.py",
    "script.py",
    "tiers/job.py",
    "tnt.py",
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


def district(source: str) -> str:
    """``log/files.py`` is in ``log``, ``log/kafka/topics.py`` in ``log/kafka``, ``tnt.py`` in ``tnt``."""
    name = source.removesuffix(".py")
    return max((each for each in DISTRICTS if f"{name}/".startswith(f"{each}/")), key=len, default=name)


def importers(library: str) -> set[str]:
    """Files that import ``library`` or something in it."""
    return {source for source in SOURCES if any(f"{name}.".startswith(f"{library}.") for name in imports(source))}


def ours(source: str) -> Iterator[str]:
    """The districts of everything of ours that a file imports."""
    for name in imports(source):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        tails = ("/".join(parts[1:length]) for length in range(len(parts), 1, -1))
        files = (file for tail in tails for file in (f"{tail}.py", f"{tail}/__init__.py"))
        yield district(next((file for file in files if file in SOURCES), "__init__.py"))


def test_the_package_was_found() -> None:
    assert {"model/kernels.py", "format/frame.py", "log/files.py", "log/control/partition.py"} <= SOURCES.keys()
    assert "torch.distributed" in imports("checkpointer.py")


def test_districts_import_what_they_state_alone() -> None:
    for source in SOURCES:
        here = district(source)
        assert here in DISTRICTS or source.endswith("/__init__.py"), f"state what this district may import: {source}"
        allowed = {here, "errors", "util", *DISTRICTS.get(here, "").split()}
        assert set(ours(source)) - allowed == set(), source


def test_imports_between_districts_run_one_way() -> None:
    above: dict[str, set[str]] = {}
    for here, names in DISTRICTS.items():
        above.setdefault(here, set())
        for name in names.split():
            if (here, name) not in ONE_WAY_BUT_FOR:
                above.setdefault(name, set()).add(here)
    for start in DISTRICTS:
        reached, todo = set(), [start]
        while todo:
            fresh = above[todo.pop()] - reached
            reached |= fresh
            todo += fresh
        assert start not in reached, f"{start} is imported by what it imports"


def test_the_core_knows_no_extras() -> None:
    for source in SOURCES:
        if not source.startswith(("extras/", "cli/", "checkpointer.py", "__init__.py")):
            assert not any(name.startswith("extras") for name in ours(source)), source


VOCABULARY = {
    "format": "claim_changes control dense dense_files end_note entry_digests frame lineage proof record rows schema",
    "util": "config durable interpreter_exit layout metrics options ports service types units uris",
}
"""Modules that anyone may use, apart from ``errors``: values that logs and stores are made of, and tools that know
nothing of ours. Only fewer from here on."""
CLI_IMPORTS_PAST_IT = {
    "dense": 1,
    "evolve": 5,
    "find": 10,
    "flags": 5,
    "format": 5,
    "log": 6,
    "log/control": 3,
    "maintain": 7,
    "maintain/engine": 5,
    "maintain/gc": 17,
    "maintain/materialize_service": 1,
    "maintain/recover": 1,
    "maintain/scrub": 7,
    "native": 1,
    "proofs": 3,
    "save": 1,
    "store": 21,
    "util": 5,
    "verify": 5,
}
"""District -> how many of its names the command line still imports past the inner API. Only fewer from here on."""


def past_the_inner_api(folder: str) -> dict[str, set[str]]:
    """District -> names of the core, neither public nor vocabulary, that files of ``folder`` do not take from it."""
    public = imports("__init__.py")
    free = {f"{PACKAGE}.{part}.{module}." for part, modules in VOCABULARY.items() for module in modules.split()}
    own = (f"{PACKAGE}.errors.", f"{PACKAGE}.inner.", f"{PACKAGE}.extras.", f"{PACKAGE}.cli.", *free)
    found: dict[str, set[str]] = {}
    for source in SOURCES:
        for name in imports(source) if source.startswith(f"{folder}/") else ():
            if (
                name.startswith(f"{PACKAGE}.")
                and name.count(".") > 1
                and name not in public
                and not name.startswith(own)
            ):
                file = name.removeprefix(f"{PACKAGE}.").rpartition(".")[0].replace(".", "/")
                found.setdefault(district(f"{file}.py"), set()).add(name)
    return found


def test_extras_use_the_inner_api_public_names_and_vocabulary_alone() -> None:
    assert past_the_inner_api("extras") == {}


def test_the_command_line_takes_ever_fewer_names_past_the_inner_api() -> None:
    assert {here: len(names) for here, names in past_the_inner_api("cli").items()} == CLI_IMPORTS_PAST_IT, (
        "lower the number"
    )


def test_the_inner_api_is_one_page_of_40_names() -> None:
    stated = {name.removeprefix(f"{PACKAGE}.") for name in imports("inner.py") if name.startswith(f"{PACKAGE}.")}
    assert stated == {f"{module}.{name}" for name, (module, _) in inner.PAGE.items()}
    assert len(inner.PAGE) <= 40
    assert sum(len(modules.split()) for modules in VOCABULARY.values()) <= 23


def test_fbgemm_is_known_to_the_model_district_alone() -> None:
    assert {district(source) for source in importers("fbgemm_gpu")} == {"model"}


def test_of_torchrec_others_know_the_constraints_of_its_planner_only() -> None:
    assert {district(source) for source in importers("torchrec")} == {"model", "extras/planner"}
    (constraints,) = (name for name in imports("extras/planner.py") if name.startswith("torchrec."))
    assert constraints == "torchrec.distributed.planner.types.ParameterConstraints"


def test_private_names_of_torch_and_torchrec_are_imported_by_the_model_district_alone() -> None:
    libraries = ("torch.", "torchrec.", "fbgemm_gpu.")
    private = {
        source
        for source in SOURCES
        for name in imports(source)
        if name.startswith(libraries) and any(part.startswith("_") for part in name.split("."))
    }
    assert {district(source) for source in private} <= {"model"}


def test_the_kafka_client_stays_in_its_modules() -> None:
    assert importers("confluent_kafka") == CLIENT_OF_KAFKA


def test_fsspec_stays_in_its_module_and_no_file_system_of_it_is_imported_by_name() -> None:
    assert importers("fsspec") == {"store/remote.py"}
    assert importers("s3fs") == set()
    # It takes away a wait of theirs that has no end, for which they have no setting.
    assert importers("botocore") == importers("aiobotocore") == {"store/clouds.py"}


def test_ray_is_imported_by_its_engine_alone_when_it_is_used() -> None:
    assert importers("ray") == set(), "by name: maintain/engine/on_ray.py asks importlib"
    assert [source for source in SOURCES if '"ray"' in SOURCES[source].read_text()] == [
        "maintain/engine/choose.py",
        "maintain/engine/on_ray.py",
    ]


def test_the_client_of_prometheus_stays_in_its_module() -> None:
    assert importers("prometheus_client") == {"util/metrics.py"}


def test_torchtnt_is_imported_by_its_callback_alone() -> None:
    assert importers("torchtnt") == {"tnt.py"}


def test_tensorboard_is_imported_where_scalars_are_written() -> None:
    assert importers("torch.utils.tensorboard") == {"save/metrics_export.py"}


def test_process_groups_stay_where_ranks_talk() -> None:
    # Post-local SGD is an optimizer that stands there; its group is its own.
    talking = {"dense", "ranks", "save", "checkpointer", "script", "extras/interchange"}
    others = {"restore/apply.py", "model/wrappers.py"}
    for source in importers("torch.distributed"):
        assert district(source) in talking or source in others
    of_checkpoints = ("torch.distributed.checkpoint.",)
    for source in (source for source in importers("torch.distributed") if district(source) == "extras/interchange"):
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


def test_tests_use_at_most_60_private_attributes_of_other_objects() -> None:
    """Counted are names that the package has. They were 279 when they were first counted."""
    defined = re.compile(r"(?:\bdef |\bclass |\bself\.|\bcls\.|^)(_[a-zA-Z]\w*)", re.MULTILINE)
    ours = {name for path in SOURCES.values() for name in defined.findall(path.read_text())}
    ours -= {
        "_buffers",
        "_config",
        "_exit",
        "_lookups",
        "_make",
        "_optimizer",
        "_replace",
        "_version",
    }  # of others, too
    used = re.compile(r"(?<!\bself)(?<!\bcls)(?<!super\(\))\.(_[a-zA-Z]\w*)")
    places = []
    for path in sorted((ROOT.parent / "tests").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if ours & {*used.findall(text)} else ():
            private = isinstance(node, ast.Attribute) and node.attr in ours
            if private and ast.unparse(node.value) not in ("self", "cls", "super()"):
                places.append(f"{path.name}:{node.lineno} {node.attr}")
    assert len(places) <= 60, "\n".join(places)


def test_150_files_of_tests_import_what_is_public_vocabulary_or_on_a_page_alone() -> None:
    """The pages are ``inner.py``, and ``tests/parts.py`` for tests alone. Of these files 39 were there at first."""
    allowed = {"", "errors", "flags", "inner", "recipes"} | {
        f"{part}.{name}" for part, names in VOCABULARY.items() for name in names.split()
    }
    asked = re.compile(rf"^\s*(?:from|import) {PACKAGE}\.?([\w.]*)", re.MULTILINE)
    files = sorted((ROOT.parent / "tests").rglob("test_*.py"))
    outside = [path.name for path in files if set(asked.findall(path.read_text())) <= allowed]
    assert len(outside) >= 150, len(outside)


def test_the_page_of_tests_states_the_types_of_all_its_names() -> None:
    tree = ast.parse((ROOT.parent / "tests" / "parts.py").read_text())
    stated = {
        f"{node.module}.{name.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
        for name in node.names
    }
    assert stated == {f"{PACKAGE}.{module}.{name}" for name, module in parts.PARTS.items()}


def test_no_file_has_more_than_800_lines() -> None:
    project = ROOT.parent
    folders = ("torchrec_stream_ckpt", "torchx_components", "recipes", "scripts", "benchmarks", "tests")
    long = {
        f"{path.relative_to(project)}: {lines}"
        for path in (path for folder in folders for path in (project / folder).rglob("*.py"))
        if (lines := path.read_bytes().count(b"\n")) > 800
    }
    assert long == set(), "split them by what they do, or show"


def test_torch_is_imported_where_tensors_are_alone() -> None:
    assert [source for source in sorted(importers("torch")) if not source.startswith(WITH_TORCH)] == []


def test_what_the_extra_export_brings_is_imported_by_its_format_alone() -> None:
    assert importers("pyarrow") == {"extras/interchange/parquet.py"}
    assert importers("safetensors") == set()


def test_numbers_in_text_are_the_digits_0_to_9_alone() -> None:
    """``\\d`` and ``isdecimal()`` accept the digits of every script: one id would have several names."""
    found = {
        source: len(hits)
        for source, path in SOURCES.items()
        if (hits := re.findall(r"\\d|\.is(?:decimal|digit|numeric)\(", path.read_text()))
    }
    assert found == {"evolve/changes.py": 1, "util/units.py": 1}, "the first is an example of a user's pattern"


def test_a_moment_becomes_text_in_one_place_which_knows_that_a_record_may_say_any_number() -> None:
    asked = re.compile(r"\b(strftime|gmtime|localtime|fromtimestamp)\b")
    assert {source for source, path in SOURCES.items() if asked.search(path.read_text())} == {"util/units.py"}


def test_tasks_messages_of_ranks_and_the_users_objects_alone_are_pickled() -> None:
    """Tasks on their way to a worker of the same version, what one rank of a job sends to the others, and what
    ``torch.save`` pickles for a blob of the dense state."""
    assert importers("pickle") == {"maintain/engine/parcel.py", "ranks/collective.py", "dense/exact_pickle.py"}


def modules() -> list[str]:
    """Every module that must run without torch, but for those of a client library."""
    clients = CLIENT_OF_KAFKA | {"store/remote.py"}
    light = [source for source in SOURCES if not source.startswith(WITH_TORCH) and source not in clients]
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
    assert f"{PACKAGE}.extras.broker.kraft" in names
    assert {f"{PACKAGE}.{name}" for name in ("restore.plan", "find.find", "save.generation")} <= set(names)
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = (set(found) for found in json.loads(done.stdout.splitlines()[-1]))
    assert after & {"torch", "torchrec", "fbgemm_gpu"} == set()
    assert {"confluent_kafka", "fsspec", "prometheus_client"} & before == set()
    assert {"confluent_kafka", "fsspec"} <= after


def test_a_user_who_imports_the_package_sees_no_warning_of_it() -> None:
    program = f"import {PACKAGE} as package; [getattr(package, name) for name in package.__all__]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.findall(rf".*/{PACKAGE}/.*Warning.*", done.stderr)


def test_what_the_training_thread_may_wait_for_is_never_left_locked_by_a_signal() -> None:
    found_in = ("capture/", "dense/", "format/", "job/", "log/", "model/", "ranks/", "restore/", "save/")
    made = re.compile(r"(threading\.(Condition|Event|Semaphore|Barrier)|\bFuture|\bQueue)\(")
    found = [name for name, path in SOURCES.items() if name.startswith(found_in) and made.search(path.read_text())]
    assert found == []


def test_no_two_classes_share_a_name() -> None:
    """One noun for one thing, and one thing for one noun."""
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
