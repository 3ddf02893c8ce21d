"""What the benchmarks share, where a slip would file a wrong number."""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_pages import page

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the benchmarks, under a name of its own; the allocator of this process stays as it is."""
    monkeypatch.setenv("BENCH_ALLOCATOR", "default")
    monkeypatch.delitem(sys.modules, "allocator", raising=False)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"bench_{path.replace('/', '_')}", BENCHMARKS / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("common", monkeypatch)


def report(common: ModuleType, measured: Any) -> Any:
    found = common.Report("case", argparse.Namespace(out=None), machine={})
    found.add("point", measured, "base")
    return found


def test_a_ratio_above_one_means_less_time_than_the_baseline_in_the_same_round(common: ModuleType) -> None:
    found = report(common, common.Measured({"base": [4.0, 6.0, 8.0], "ours": [2.0, 1.0, 8.0]}))
    row = found.points["point"]["variants"]["ours"]
    assert (row["median"], row["ratio"], row["ratio_range"]) == (2000.0, 2.0, [1.0, 6.0])
    assert found.paired("point", "ours", "base") == 0.5


def test_warm_up_rounds_do_not_count_and_every_variant_runs_once_a_round(common: ModuleType) -> None:
    ran: list[str] = []
    variants = {name: (lambda name=name: float(ran.append(name) or len(ran))) for name in "ab"}
    measured = common.take_turns(variants, rounds=3, warm_up=2)
    assert [sorted(ran[n : n + 2]) for n in range(0, 10, 2)] == [["a", "b"]] * 5
    assert sorted(measured.times["a"] + measured.times["b"]) == [5, 6, 7, 8, 9, 10]


def test_what_cannot_run_has_a_reason_and_no_figure(common: ModuleType) -> None:
    def missing() -> float:
        raise common.UnavailableError("peer is not installed")

    found = report(common, common.take_turns({"base": lambda: 1.0, "peer": missing}, rounds=2))
    assert found.points["point"]["variants"]["peer"] == {"unavailable": "peer is not installed"}
    assert (
        found.ratio("point", "peer") is found.median("point", "peer") is found.paired("point", "base", "peer") is None
    )
    assert "not measured: peer is not installed" in "\n".join(found.lines())


def test_wall_and_cpu_seconds_of_a_round_belong_together(common: ModuleType) -> None:
    ran = {"a": iter([(9.0, 8.0), (1.0, 0.5), (2.0, 0.7)]), "b": iter([(9.0, 8.0), (4.0, 3.0), (6.0, 5.0)])}
    wall, cpu = common.in_turns({name: (lambda own=own: next(own)) for name, own in ran.items()}, rounds=2)
    assert wall.times == {"a": [1.0, 2.0], "b": [4.0, 6.0]}
    assert cpu.times == {"a": [0.5, 0.7], "b": [3.0, 5.0]}


def test_requests_in_turn_are_the_longest_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    far = load("bucket/far", monkeypatch)
    spans = {
        (): 0,
        ((0, 1), (1, 2), (2, 3)): 3,
        ((0, 2), (1, 3), (2, 4)): 2,  # the second one overlaps both others
        ((0, 9), (1, 2), (3, 4)): 2,
        ((0, 1), (2, None), (3, 4)): 2,  # one was never answered
    }
    for each, turns in spans.items():
        assert far.in_turn([far.Request("get", *span) for span in each]) == turns


def test_a_goal_without_a_figure_is_neither_reached_nor_missed(common: ModuleType) -> None:
    found = report(common, common.Measured({"base": [1.0]}))
    found.goals = [
        common.Goal.at_least("a", 8, None),
        common.Goal.at_least("b", 8, 9.0),
        common.Goal.at_most("c", 8, 9.0, "ms"),
    ]
    lines = list(found.lines())[-3:]
    assert [line.split()[0] for line in lines] == ["not", "reached", "MISSED"]


def test_the_filed_command_leaves_out_where_results_go(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(common, common.Measured({"base": [1.0]}))
    monkeypatch.setattr(sys, "argv", ["run.py", "--rounds", "3", "--out", "/some/where.json", "--rows", "7"])
    assert found.command == "python benchmarks/case/run.py --rounds 3 --rows 7"
    monkeypatch.setattr(sys, "argv", ["run.py", "--out=/some/where.json"])
    assert found.command == "python benchmarks/case/run.py"


def test_chunks_of_the_thesis_design_come_together_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whole tables in small chunks; of a checkpoint only the rows that have changed, and nothing that was pickled."""
    monkeypatch.setitem(sys.modules, "common", load("common", monkeypatch))
    design = load("thesis/design", monkeypatch)
    tables = [torch.rand(5, 4), torch.rand(300_000, 4), torch.rand(1, 4)]
    chunks = [parts for number, table in enumerate(tables) for parts in design.serialized(number, None, table)]
    assert max(sum(map(len, parts)) for parts in chunks) <= design.CHUNK_BYTES + 32
    changed = [torch.rand(len(table)) < 0.5 for table in tables]
    before = [mask.clone() for mask in changed]
    sink = design.FileSink(tmp_path / "chunks")
    design.write(sink, changed, tables)
    sink.sync()
    sink.close()
    assert not any(mask.any() for mask in changed)
    found = [torch.zeros_like(table) for table in tables]
    rows = design.read_chunks(tmp_path / "chunks", found)
    assert rows == sum(int(mask.sum()) for mask in before)
    assert all(torch.equal(one, other * mask[:, None]) for one, other, mask in zip(found, tables, before, strict=True))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("device", monkeypatch)


def test_more_ranks_than_gpus_are_refused(device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2 ranks need a GPU each, torch finds 1"):
        device.join("cuda", tmp_path / "group", 0, 2)


def test_a_rank_on_a_gpu_has_the_gpu_of_its_number_and_nccl(
    device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(device.dist, "init_process_group", lambda backend, **_more: asked.append(backend))
    monkeypatch.setattr(device.os, "environ", {})
    assert device.join("cuda", tmp_path / "group", 1, 2) == torch.device("cuda", 1)
    assert asked == [1, "cpu:gloo,cuda:nccl"]


def test_a_time_ends_when_the_gpu_is_through(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("wait"))
    common.timed(lambda: asked.append("work"))
    assert asked == ["wait", "work", "wait"]


FAULTS = """
import os, resource
import allocator
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = b"x" * (64 << 20)
del block
before = faults()
block = b"x" * (64 << 20)
print(faults() - before, os.environ.get("MALLOC_TRIM_THRESHOLD_", "-"))
"""


def test_memory_that_was_freed_stays_in_every_process() -> None:
    """By default each block of 64 MB is mapped anew; page faults decide then what a short run takes."""
    found = {}
    for setting in ("default", "fixed"):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        env["BENCH_ALLOCATOR"] = setting
        call = [sys.executable, "-c", FAULTS]
        done = subprocess.run(call, cwd=BENCHMARKS, env=env, capture_output=True, text=True, timeout=300, check=True)
        found[setting] = done.stdout.split()
    assert int(found["default"][0]) > 10_000 > 1_000 > int(found["fixed"][0])
    assert found["fixed"][1].isdecimal(), "processes that are started from there have it, too"


def test_every_result_names_the_allocator_setting(common: ModuleType) -> None:
    assert "default" in common.machine()["allocator"]["setting"]


def test_a_machine_that_is_too_small_is_told_before_a_case_starts(common: ModuleType, tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path / "result.json")
    for room, word in (({"memory": 1 << 60}, "of memory"), ({"disk": 1 << 60}, "of disk")):
        with pytest.raises(SystemExit) as ended:
            common.refuse_small_machine("case", args, "the tables", **room)
        assert ended.value.code == 0, "the next case can run"
        assert word in json.loads(args.out.read_text())["not measured"]
    common.refuse_small_machine("case", args, "nothing", memory=1, disk=1)


def test_quick_sizes_count_where_no_other_is_given(common: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_START", "spawn")
    parser = common.arguments("doc")
    parser.add_argument("--rows", type=int, default=1000)
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--rows", "7"])
    args = common.parse(parser, rows=3, rounds=1)
    assert (args.rows, args.rounds) == (7, 1)


def test_rows_without_room_are_filed_by_name_and_the_others_run(common: ModuleType) -> None:
    found = common.Report("case", argparse.Namespace(out=None), machine={})
    rooms = {
        "small": common.Room("one byte", memory=1, disk=1, shared=1),
        "memory": common.Room("a large job", memory=1 << 60),
        "disk": common.Room("a large log", disk=1 << 60),
        "shared": common.Room("a large HEAD", shared=1 << 60),
    }
    assert common.with_room(found, rooms) == ["small"]
    assert set(found.facts) == {f"{row} is not measured" for row in ("memory", "disk", "shared")}
    assert found.facts["memory is not measured"].startswith("a large job needs 1152921504.6 GB of memory, ")
    assert found.facts["disk is not measured"].startswith("a large log needs 1152921504.6 GB of disk, ")
    assert found.facts["shared is not measured"].startswith("a large HEAD, in /dev/shm needs 1152921504.6 GB of disk, ")


def test_variants_of_two_points_are_told_apart_by_how_their_names_end(common: ModuleType) -> None:
    measured = common.Measured({"a": [1.0], "a, durable": [2.0]}, {"b, durable": "there is no broker"})
    plain, durable = measured.split(common.DURABLE)
    assert (plain.times, plain.unavailable) == ({"a": [1.0]}, {})
    assert (durable.times, durable.unavailable) == ({"a": [2.0]}, {"b": "there is no broker"})


def test_the_load_is_that_of_the_minute_before_the_process_began(common: ModuleType) -> None:
    assert common.machine()["load_average"] == sys.modules["start"].LOAD


def test_time_that_cores_idle_or_wait_for_a_disk_is_not_busy(common: ModuleType) -> None:
    assert common._busy_ticks("cpu  1 20 300 999 999 4000 50000 600000 7 7\ncpu0 9 9 9 9 9 9 9 9 9 9\n") == 654321


def test_what_another_process_computes_keeps_cores_busy(common: ModuleType) -> None:
    spinning = "print('spins', flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", spinning], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = common.busy_cores(0.3)
        process.kill()
    assert found > 0.1


SCRIPTS = sorted(path for path in BENCHMARKS.glob("*/*.py") if '__name__ == "__main__"' in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_finds_its_checkout_without_an_install_and_notes_the_load_before_all_else(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first lines run here, where nothing is on the path but the standard library and the script's folder."""
    standard = [str(Path(os.__file__).parent), str(Path(os.__file__).parent / "lib-dynload")]
    monkeypatch.setattr(sys, "path", [str(script.parent), *standard])
    tree = ast.parse(script.read_text())
    ours = next(number for number, node in enumerate(tree.body) if _imports(node) == {"start"})
    imported = set().union(*map(_imports, tree.body[:ours]))
    assert imported <= {*sys.stdlib_module_names}, "what takes seconds to import comes after the load is noted"
    exec(compile(ast.Module(tree.body[:ours], []), str(script), "exec"), {"__file__": str(script)})
    for name in ("start", "common", "tests", "torchrec_stream_ckpt"):
        found = importlib.machinery.PathFinder.find_spec(name, sys.path)
        assert found is not None, name
        assert str(found.origin).startswith(str(BENCHMARKS.parent)), name


def _imports(node: ast.AST) -> set[str]:
    """Top-level names of the packages that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).partition(".")[0]}
    return {each.name.partition(".")[0] for each in node.names} if isinstance(node, ast.Import) else set()


@pytest.mark.kafka
def test_a_broker_of_a_case_syncs_or_leaves_it_to_the_kernel(bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

    monkeypatch.setitem(sys.modules, "common", load("common", monkeypatch))
    brokers, admin = load("brokers", monkeypatch), AdminClient({"bootstrap.servers": bootstrap})
    topic = f"synced-{os.getpid()}"
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    asked = ConfigResource(ConfigResource.Type.TOPIC, topic)
    for fsync, messages in ((True, 1), (False, (1 << 63) - 1)):
        brokers.set_fsync(bootstrap, fsync)
        assert int(admin.describe_configs([asked])[asked].result(30)["flush.messages"].value) == messages


def test_nobody_syncs_where_no_fsync_is_asked_for_and_everybody_again_after_it(common: ModuleType) -> None:
    before = os.fsync, os.fdatasync
    with common.without_fsync():
        os.fsync(-1)
        os.fdatasync(-1)
    assert (os.fsync, os.fdatasync) == before


def test_a_log_that_nobody_reads_gives_its_blocks_back_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "data" / "one.seg"
    path.parent.mkdir()
    path.write_bytes(b"x" * (1 << 20))
    with path.open("ab") as file:
        load("holes", monkeypatch).punch(tmp_path)
        file.write(b"later")
    assert path.stat().st_size == (1 << 20) + 5
    assert path.stat().st_blocks * 512 <= 1 << 16
    assert path.read_bytes().endswith(b"\0later")


def test_warm_files_are_in_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = load("cache", monkeypatch)
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    (tmp_path / "empty").touch()
    cache.prepare(cache.WARM, tmp_path, tmp_path / "nothing")
    assert cache.resident(list(cache.files_under(tmp_path))) == 1
    monkeypatch.setattr(cache, "chill", lambda files, *, drop_caches: chilled.extend(files))
    chilled: list[Path] = []
    cache.prepare(cache.COLD, tmp_path)
    assert chilled == [tmp_path / "file"]


def test_every_case_has_quick_sizes_and_says_how_long_it_takes_and_what_is_objected() -> None:
    for script in sorted(BENCHMARKS.glob("*/run.py")):
        page = (script.parent / "README.md").read_text()
        assert "parse(" in script.read_text() or "--quick" in script.read_text(), script
        for word in ("allocator", "object", "Time: "):
            assert word in page, f"{script.parent.name}/README.md has no {word!r}"


def test_slices_of_a_dense_state_are_all_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As VELOC-Sharded has them: each tensor along its largest dimension."""
    veloc = load("dense/veloc", monkeypatch)
    state = [
        ("wide", torch.randn(3, 8)),
        ("tall", torch.randn(5, 2)),
        ("one", torch.tensor(1.0)),
        ("n", torch.arange(3)),
    ]
    for ranks in (1, 2, 4):
        parts = [veloc.sliced(state, rank, ranks) for rank in range(ranks)]
        assert sum(each.numel() for part in parts for _, each in part) == sum(each.numel() for _, each in state)
        assert [dict(part)["wide"].shape for part in parts] == [(3, 8 // ranks)] * ranks
        for rank, part in enumerate(parts):
            regions = veloc.Veloc(part, tmp_path / "scratch", tmp_path / f"{ranks}-{rank}")
            regions.checkpoint().result()
            assert regions.holds_the_state()
            dict(part)["wide"].add_(1)
            assert not regions.holds_the_state()
            regions.close()


# What is said of other tools beside their figures.


def test_torchsnapshot_makes_no_copy_of_a_tensor_in_host_memory() -> None:
    """So its figure in ``marker`` is of a call that training may not go on after, and the pages say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchsnapshot.io_preparers.tensor import TensorIOPreparer
    tensor = torch.zeros(1000)
    _, (request,) = TensorIOPreparer.prepare_write("x", tensor, is_async_snapshot=True)
    staged = asyncio.run(request.buffer_stager.stage_buffer())
    tensor.fill_(1)  # a later step
    assert np.frombuffer(staged, np.float32).sum() == 1000
    for name in ("README.md", "docs/performance.md", "benchmarks/marker/README.md"):
        assert "copies nothing" in " ".join(page(name).split()), name
