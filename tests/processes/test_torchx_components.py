"""The components say what is wrong before a scheduler is asked, and are found as TorchX finds components."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import RetryPolicy, Role, finder
from torchx.specs.finder import ComponentValidationException, CustomComponentsFinder, ModuleComponentsFinder

from tests.golden.make_torchx import PIPELINE, ROOT, SERVICE, TRAIN, torchx
from torchrec_stream_ckpt.components import roles
from torchrec_stream_ckpt.components.pipeline import stream_ckpt
from torchrec_stream_ckpt.components.service import materialize
from torchrec_stream_ckpt.components.train import dlrm

KAFKA = "kafka://k1:9092,k2:9092/ads"


def command_of(role: Role) -> str:
    return " ".join([role.entrypoint, *role.args])


@pytest.mark.parametrize("j", ["2", "x2", "2x", "0x2", "2x0", "3:2x1", "0:2x1", "1:2:3x1", "-1x2", "2X4", " 1x2", ""])
def test_nodes_and_processes_of_another_form_are_refused_with_the_form(j: str) -> None:
    with pytest.raises(ComponentValidationException, match=r"-j .*(NODESxPROCS|at least 1)"):
        dlrm(j=j)


@pytest.mark.parametrize(("j", "parsed"), [("1x2", (1, 1, 2)), ("4x8", (4, 4, 8)), ("1:3x8", (1, 3, 8))])
def test_nodes_and_processes(j: str, parsed: tuple[int, int, int]) -> None:
    assert roles.parse_nodes(j) == parsed


@pytest.mark.parametrize("args", [("--stream_ckpt", KAFKA), (f"--stream_ckpt={KAFKA}", "--marker_every", "9")])
def test_a_log_in_kafka_without_a_store_is_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(ComponentValidationException, match="needs --store URL"):
        dlrm(*args)
    assert dlrm(*args, "--store=s3://ckpt/ads").roles[0].name == "trainer"


@pytest.mark.parametrize(
    "uri", ["ckpt", "/ckpt", "file://", "kafka://k1:9092", "kafka:///ads", "http://k1/ads", "s3://ads"]
)
def test_a_log_of_another_form_is_refused_with_the_form(uri: str) -> None:
    for build in (lambda: dlrm("--stream_ckpt", uri), lambda: stream_ckpt(uri=uri, store="file:///store")):
        with pytest.raises(
            ComponentValidationException, match=r"must be file://DIR, kafka://HOST:PORT,.../JOB or s3://BUCKET/PREFIX"
        ):
            build()


@pytest.mark.parametrize("uri", ["s3://bucket/ads/job", "gs://bucket/ads", "az://container/ads"])
def test_a_log_in_a_bucket_needs_no_store(uri: str) -> None:
    assert dlrm("--stream_ckpt", uri).roles[0].name == "trainer"
    assert [role.name for role in stream_ckpt(uri=uri, store=uri).roles] == ["trainer", "materializer"]


def test_every_log_of_a_tee_is_checked() -> None:
    with pytest.raises(ComponentValidationException, match="needs --store"):
        dlrm("--stream_ckpt=file:///local", f"--stream_ckpt={KAFKA}")


def test_more_ranks_than_samples_are_refused() -> None:
    with pytest.raises(ComponentValidationException, match="at least the number of ranks, 8"):
        dlrm("--batch_size", "7", j="1:2x4")
    assert dlrm("--batch_size=8", j="1:2x4").roles[0].num_replicas == 2


def test_more_processes_than_gpus_are_refused() -> None:
    with pytest.raises(ComponentValidationException, match="8 processes do not fit a node of 4 GPUs"):
        dlrm(j="1x8", gpu=4)
    assert dlrm(j="1x4", gpu=4).roles[0].resource.gpu == 4


def test_a_node_has_room_for_its_processes() -> None:
    def size(j: str, **given: int) -> tuple[int, int]:
        resource = dlrm(j=j, **given).roles[0].resource
        return resource.cpu, resource.memMB

    assert [size("1x2"), size("2x8"), size("1:3x4")] == [(2, 8192), (8, 32768), (4, 16384)]
    assert size("2x8", gpu=8) == (64, 262144)
    assert size("2x8", gpu=8, cpu=96, memMB=1000000) == (96, 1000000)
    trainer, beside = stream_ckpt(uri=KAFKA, store="s3://ckpt/ads", j="2x8", gpu=8).roles
    assert (trainer.resource.cpu, beside.resource.cpu) == (64, 2)


def test_efa_devices_are_those_that_were_asked_for_or_those_of_the_named_resource() -> None:
    def efa(**given: Any) -> dict[str, int]:
        return dict(dlrm(j="1x8", **given).roles[0].resource.devices)

    assert efa(gpu=8) == {}
    assert efa(gpu=8, efa=4) == {"vpc.amazonaws.com/efa": 4}
    assert efa(h="aws_p5.48xlarge") == {"vpc.amazonaws.com/efa": 32}
    assert efa(h="aws_p5.48xlarge", efa=16) == {"vpc.amazonaws.com/efa": 16}
    with pytest.raises(ComponentValidationException, match=r"--efa must be .* got -1"):
        dlrm(efa=-1)


@pytest.mark.parametrize("conf", ["timeout", "timeout=", "a=1 b=2", "a=1,,b=2"])
def test_a_rendezvous_setting_of_another_form_is_refused(conf: str) -> None:
    with pytest.raises(ComponentValidationException, match="KEY=VALUE,KEY=VALUE"):
        dlrm(rdzv_conf=conf)


def test_an_elastic_job_restarts_and_waits_less_than_torchrun_by_itself_would() -> None:
    fixed, elastic = (command_of(dlrm(j=j).roles[0]) for j in ("3x1", "1:3x1"))
    assert "--max_restarts" not in fixed
    assert "--rdzv_conf" not in fixed
    assert f"--max_restarts {roles.ELASTIC_RESTARTS}" in elastic
    assert f"--rdzv_conf {roles.ELASTIC_RENDEZVOUS}" in elastic
    assert dlrm(j="1:3x1").roles[0].env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    chosen = command_of(dlrm(j="1:3x1", max_restarts=7, rdzv_conf="last_call_timeout=60").roles[0])
    assert "--max_restarts 7" in chosen
    assert "--rdzv_conf last_call_timeout=60" in chosen
    assert "--max_restarts" not in command_of(dlrm(j="1:3x1", max_restarts=0).roles[0])


def test_the_trainer_and_the_materializer_get_one_log_and_one_store() -> None:
    app = stream_ckpt("--marker_every", "9", uri=KAFKA, store="s3://ckpt/ads", commit_key_file="/key", max_retries=2)
    trainer, materializer = app.roles
    assert f"--stream_ckpt={KAFKA} --store=s3://ckpt/ads --commit_key_file=/key --marker_every 9" in command_of(trainer)
    expected = f"stream-ckpt materialize {KAFKA} --store s3://ckpt/ads --commit-key-file /key"
    assert command_of(materializer) == expected
    assert [role.max_retries for role in app.roles] == [2, 2]


def test_the_materializer_of_a_pipeline_takes_nothing_down_on_volcano() -> None:
    trainer, beside = stream_ckpt(uri=KAFKA, store="s3://ckpt/ads", max_retries=2).roles
    assert (trainer.retry_policy, trainer.min_replicas) == (RetryPolicy.APPLICATION, 1)
    assert (beside.retry_policy, beside.min_replicas) == (RetryPolicy.REPLICA, 0)


def test_a_materializer_of_its_own_is_a_job_of_one_process() -> None:
    app = materialize(
        "--compact",
        "span4",
        uri=KAFKA,
        store="s3://ckpt/ads",
        kafka_options="/k",
        mounts=["type=bind", "src=/a", "dst=/b"],
    )
    (role,) = app.roles
    expected = f"stream-ckpt materialize {KAFKA} --store s3://ckpt/ads --kafka-options /k --compact span4"
    assert command_of(role) == expected
    assert (role.num_replicas, role.max_retries, role.resource.gpu) == (1, 10, 0)
    assert [mount.dst_path for mount in role.mounts] == ["/b"]


@pytest.mark.parametrize(
    ("flags", "mistake"),
    [
        (["--compcat", "span4"], "No such option"),
        (["--compact", "span5"], "span5"),
        (["--metrics-port", "http"], "metrics-port"),
        (["file:///other"], "unexpected extra argument"),
        (["--help"], "it shows its help and ends"),
    ],
)
def test_flags_that_the_materializer_does_not_take_are_refused(flags: list[str], mistake: str) -> None:
    with pytest.raises(ComponentValidationException, match=mistake):
        materialize(*flags, uri=KAFKA, store="s3://ckpt/ads")


def test_a_second_log_behind_the_pipeline_is_refused() -> None:
    for flag in ("--stream_ckpt", "--store"):
        with pytest.raises(ComponentValidationException, match="pass --uri and --store to the component"):
            stream_ckpt(flag, "file:///other", uri="file:///log", store="file:///store")


def test_a_broker_for_trials_is_loopback_on_one_node() -> None:
    with pytest.raises(ComponentValidationException, match=r"requires --uri kafka://127\.0\.0\.1:PORT/JOB"):
        stream_ckpt(uri=KAFKA, store="file:///store", broker="b")
    with pytest.raises(ComponentValidationException, match="must be one node"):
        stream_ckpt(uri="kafka://127.0.0.1:9092/ads", store="file:///store", broker="b", j="2x1")
    app = stream_ckpt(uri="kafka://127.0.0.1:9092/ads", store="file:///store", broker="b")
    assert [role.name for role in app.roles] == ["trainer", "materializer", "broker"]
    assert "stream-ckpt broker start --dir b --port 9092 --with-parent" in command_of(app.roles[2])
    for role in app.roles[:2]:
        assert "until stream-ckpt broker status --dir b" in command_of(role)


@pytest.mark.parametrize("component", [TRAIN, PIPELINE, SERVICE])
def test_torchx_finds_a_component_by_its_file_and_keeps_its_own_names(component: str) -> None:
    path, function = component.split(":")
    before = dict(vars(finder))
    [found] = CustomComponentsFinder(str(ROOT / path), function).find()
    assert found.validation_errors == []
    shadowed = {name for name, value in before.items() if vars(finder)[name] is not value and name != "__doc__"}
    assert shadowed == set(), "TorchX executes the file among its own names"


def test_torchx_finds_exactly_the_components_where_a_package_registers_them() -> None:
    found = ModuleComponentsFinder("torchrec_stream_ckpt.components", "ours").find()
    assert {c.name for c in found if not c.validation_errors} == {
        "ours.train.dlrm",
        "ours.pipeline.stream_ckpt",
        "ours.service.materialize",
    }


@pytest.mark.parametrize("component", [TRAIN, PIPELINE])
def test_help_tells_of_every_argument(component: str) -> None:
    done = torchx("run", component, "--help")
    assert done.returncode == 0
    told = " ".join(done.stdout.split())
    for phrase in ("the recipe, a path in the image", "[MIN:]NODESxPROCS", "how often the scheduler restarts"):
        assert phrase in told


def test_a_mistake_ends_torchx_run_with_a_message_and_no_traceback() -> None:
    done = torchx("run", "-s", "slurm", TRAIN, "-j", "2")
    assert done.returncode == 1
    assert "-j must be [MIN:]NODESxPROCS, got 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_says_where_the_components_lie() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_stream_ckpt.components"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert Path(done.stdout.strip()).resolve() == ROOT / "torchx_components"


def test_without_a_script_the_installed_recipe_is_started() -> None:
    assert f"--nproc_per_node 2 --tee 3 --role '' -m {roles.RECIPE} --epochs 2" in command_of(
        dlrm("--epochs", "2").roles[0]
    )
    assert "-m " not in command_of(dlrm(script="mine.py").roles[0])
    assert importlib.util.find_spec(roles.RECIPE) is not None


@pytest.mark.parametrize("module", ["components", "components.train", "components.pipeline", "components.service"])
def test_without_torchx_the_components_say_what_to_install(module: str) -> None:
    module = f"torchrec_stream_ckpt.{module}"
    program = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import {module}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("not installed: pip install 'torchrec_stream_ckpt[torchx]'\n")
