"""The files of deploy/ say what Kubernetes, systemd, Docker, Prometheus and our own command line understand."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from kubernetes.client import models
from kubernetes.client.configuration import Configuration

from tests.parts import app
from tests.unit.folded_job import folded_job, store_of
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS, METRICS, TRAINER_METRICS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES, SYSTEMD = DEPLOY / "kubernetes", DEPLOY / "systemd"
BASE = sorted(path for path in (KUBERNETES / "base").glob("*.yaml") if path.name != "kustomization.yaml")
COMPONENTS = sorted((KUBERNETES / "components").iterdir())
UNITS = sorted(path for path in SYSTEMD.iterdir() if path.suffix in (".service", ".timer"))
VERBS = typer.main.get_command(app).commands
SERVICES = ("gc", "materialize", "scrub", "trim")
SETTINGS = dict(
    line.split("=", 1)
    for line in yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["configMapGenerator"][0][
        "literals"
    ]
)
TOOL = "/opt/stream-ckpt/bin/stream-ckpt"


def parse(arguments: list[str]) -> Mapping[str, Any]:
    """What the verb would be called with; a flag or a value that it does not take is an error."""
    verb, *rest = arguments
    return VERBS[verb].make_context(verb, rest).params


def tool(name: str) -> str:
    """A program that is not of this project."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: `make deploy-check` names what it needs")
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Both outputs of a command that has to succeed."""
    done = subprocess.run(
        command, cwd=cwd, text=True, timeout=300, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


# Kubernetes.


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document is not None]


def pod_of(document: Mapping[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    return (spec["jobTemplate"]["spec"] if document["kind"] == "CronJob" else spec)["template"]["spec"]


def expanded(arguments: list[str], settings: Mapping[str, str]) -> list[str]:
    """As Kubernetes expands ``$(NAME)``: an unknown name stays as it is."""
    return [re.sub(r"\$\((\w+)\)", lambda name: settings.get(name[1], name[0]), each) for each in arguments]


def not_of_the_api(value: Any, kind: str, where: str) -> Iterator[str]:
    """Where a manifest is not what the API of Kubernetes says, by the models of its Python client."""
    if found := re.fullmatch(r"list\[(.+)\]|dict\[str, (.+)\]", kind):
        items = enumerate(value) if found[1] else value.items()
        for key, item in items:
            yield from not_of_the_api(item, found[1] or found[2], f"{where}[{key}]")
    elif (model := getattr(models, kind, None)) is None:
        types = {"str": str, "int": int, "bool": bool, "object": object, "float": (int, float), "datetime": datetime}
        if not isinstance(value, types[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{where}: {value!r} is not {kind}"
    else:
        names = {there: ours for ours, there in model.attribute_map.items()}
        yield from (f"{where}.{key}: unknown" for key in value.keys() - names.keys())
        known = {names[key]: item for key, item in value.items() if key in names}
        settings = Configuration()
        settings.client_side_validation = True
        try:
            model(**known, local_vars_configuration=settings)
        except ValueError as error:
            yield f"{where}: {error}"
        for name, item in known.items():
            yield from not_of_the_api(item, model.openapi_types[name], f"{where}.{name}")


def api_problems(document: Mapping[str, Any]) -> list[str]:
    return list(not_of_the_api(document, f"V1{document['kind']}", document["kind"]))


@pytest.mark.parametrize("path", BASE, ids=lambda path: path.name)
def test_a_manifest_is_what_the_api_says(path: Path) -> None:
    (document,) = documents(path.read_text())
    assert api_problems(document) == []


def test_a_manifest_with_a_mistake_is_seen() -> None:
    (document,) = documents((KUBERNETES / "base" / "gc.yaml").read_text())
    document["spec"]["concurencyPolicy"] = "Forbid"
    pod_of(document)["securityContext"]["runAsUser"] = "root"
    del pod_of(document)["containers"][0]["name"]
    assert len(api_problems(document)) == 3


def test_the_kustomization_lists_the_manifests_that_there_are() -> None:
    listed = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == [path.name for path in BASE]
    example = yaml.safe_load((KUBERNETES / "example" / "kustomization.yaml").read_text())
    for folder in example["resources"] + example["components"]:
        assert (KUBERNETES / "example" / folder / "kustomization.yaml").is_file()


def test_every_pod_keeps_to_the_restricted_standard() -> None:
    pods = [pod_of(each) for path in BASE for each in documents(path.read_text()) if each["kind"] != "ServiceAccount"]
    assert len(pods) == len(SERVICES)
    for pod in pods:
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in pod["initContainers"] + pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
        assert {"secret", "emptyDir"} == {key for volume in pod["volumes"] for key in volume.keys() - {"name"}}
        scratch = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == "/tmp"]
        assert scratch == [{"name": "scratch", "mountPath": "/tmp"}]


def test_every_pod_calls_a_verb_with_flags_that_it_has() -> None:
    called = {}
    for path in BASE:
        for document in documents(path.read_text()):
            if document["kind"] != "ServiceAccount":
                arguments = expanded(pod_of(document)["containers"][0]["args"], SETTINGS)
                called[arguments[0]] = parse(arguments)
    assert sorted(called) == list(SERVICES)
    assert {values["uri"] for values in called.values()} == {SETTINGS["LOG_URI"]}
    assert {values["store"] for values in called.values()} == {SETTINGS["STORE_URL"]}
    assert (called["gc"]["newest"], called["trim"]["upto"], called["scrub"]["repair"]) == (3, "latest", True)


def test_probes_ask_the_port_that_the_materializer_serves() -> None:
    (document,) = documents((KUBERNETES / "base" / "materialize.yaml").read_text())
    (container,) = pod_of(document)["containers"]
    values = parse(expanded(container["args"], SETTINGS))
    assert values["metrics_host"] == "0.0.0.0"
    assert container["ports"] == [{"name": "metrics", "containerPort": values["metrics_port"]}]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    scraped = document["spec"]["template"]["metadata"]["annotations"]
    assert scraped["prometheus.io/port"] == str(values["metrics_port"])


def test_secrets_reach_the_service_as_files_that_it_takes(tmp_path: Path) -> None:
    """The first container copies what a mounted secret shows, with the mode that a commit key must have."""
    secret, own = tmp_path / "secrets", tmp_path / "own"
    (secret / "..data").mkdir(parents=True)
    own.mkdir()
    for name in ("commit.key", "kafka.properties"):
        (secret / "..data" / name).write_bytes(b"k" * 32)
        (secret / "..data" / name).chmod(0o440)
        (secret / name).symlink_to(f"..data/{name}")
    (document,) = documents((KUBERNETES / "base" / "gc.yaml").read_text())
    shell, flags, script = pod_of(document)["initContainers"][0]["command"]
    for source in (secret, tmp_path / "none"):  # an optional secret that is not there is an empty folder
        script_here = script.replace("/secrets", str(source)).replace("/run/stream-ckpt", str(own))
        assert run(shell, flags, script_here) == ""
    assert {path.name: path.stat().st_mode & 0o777 for path in own.iterdir()} == {
        "commit.key": 0o400,
        "kafka.properties": 0o400,
    }


@pytest.mark.parametrize("folder", COMPONENTS, ids=lambda path: path.name)
def test_the_flags_that_a_component_adds_are_those_of_every_verb(folder: Path) -> None:
    patches = yaml.safe_load((folder / "kustomization.yaml").read_text())["patches"]
    added = [operation for patch in patches for operation in yaml.safe_load(patch["patch"])]
    flags = [each["value"] for each in added if each["path"].endswith("/args/-")]
    assert {patch["target"]["kind"] for patch in patches} == {"Deployment", "CronJob"}
    for verb in SERVICES if flags else ():
        assert parse([verb, "URI", "--store=URL", flags[0]])
    assert len(set(flags)) == (folder.name != "shared-volume")


OVERLAY = """
namespace: feed
nameSuffix: -feed
resources: [base]
components: [{components}]
secretGenerator:
  - {{name: stream-ckpt, files: [commit.key]}}
  - {{name: stream-ckpt-trim, files: [commit.key]}}
"""


def test_overlays_build_and_are_what_the_api_says(tmp_path: Path) -> None:
    kubectl = tool("kubectl")
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "commit.key").write_text("k")
    names = ", ".join(f"components/{folder.name}" for folder in COMPONENTS)
    (tmp_path / "kustomization.yaml").write_text(OVERLAY.format(components=names))
    for folder in ("base", "example", "."):
        built = documents(run(kubectl, "kustomize", tmp_path / folder))
        assert [problem for each in built for problem in api_problems(each)] == []
        (settings,) = [each["data"] for each in built if each["kind"] == "ConfigMap"]
        for each in built:
            if each["kind"] in ("Deployment", "CronJob"):
                parse(expanded(pod_of(each)["containers"][0]["args"], settings))
    kinds = [each["kind"] for each in built]
    assert sorted(kinds) == ["ConfigMap"] + 3 * ["CronJob"] + ["Deployment"] + 2 * ["Secret"] + ["ServiceAccount"]
    secrets = {each["metadata"]["name"] for each in built if each["kind"] == "Secret"}
    named = {
        volume["secret"]["secretName"]
        for each in built
        if each["kind"] in ("Deployment", "CronJob")
        for volume in pod_of(each)["volumes"]
        if "secret" in volume
    }
    assert named == secrets, "each job has secrets of its own"
    assert {each["metadata"]["namespace"] for each in built} == {"feed"}


# systemd.


def exec_start(unit: Path, settings: Mapping[str, str]) -> list[str]:
    """As systemd splits and expands it: ``${NAME}`` is one word, ``$NAME`` as many as are in it."""
    (line,) = re.findall(r"^ExecStart=(.+)$", unit.read_text(), re.M)
    program, *words = line.split()
    assert program == TOOL
    whole = [re.sub(r"\$\{(\w+)\}", lambda name: settings[name[1]], word) for word in words]
    return [part for word in whole for part in (shlex.split(settings[word[1:]]) if word.startswith("$") else [word])]


def env_of(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if line and not line.startswith("#"))


def test_every_unit_calls_a_verb_with_flags_that_it_has() -> None:
    settings = env_of(SYSTEMD / "example.env")
    called = {}
    for unit in UNITS:
        if unit.suffix == ".service":
            arguments = exec_start(unit, settings)
            called[arguments[0]] = parse(arguments)
            assert unit.name == f"stream-ckpt-{arguments[0]}@.service"
    assert sorted(called) == list(SERVICES)
    assert {values["store"] for values in called.values()} == {settings["STORE_URL"]}
    assert all(values["commit_key_file"] is not None for values in called.values())
    assert {unit.stem.removeprefix("stream-ckpt-") for unit in UNITS if unit.suffix == ".timer"} == {
        "gc@",
        "scrub@",
        "trim@",
    }


def test_systemd_takes_the_units_without_a_remark(tmp_path: Path) -> None:
    verify = tool("systemd-analyze")
    for unit in UNITS:
        text = unit.read_text().replace(TOOL, "/bin/true")  # verify looks for the program
        (tmp_path / unit.name.replace("@", "@ads")).write_text(text)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert run(verify, "verify", *(f"./{name}" for name in names), cwd=tmp_path) == ""
    service = tmp_path / "stream-ckpt-gc@ads.service"
    service.write_text(service.read_text().replace("\nNice=", "\nNicee="))
    assert "Unknown key" in run(verify, "verify", f"./{service.name}", cwd=tmp_path)


# What both call, on a job.


def test_the_services_do_on_a_job_what_they_are_there_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = folded_job(tmp_path / "log")
    settings = SETTINGS | {"LOG_URI": f"file://{job.root}", "STORE_URL": str(store_of(job))}
    said = {}
    for name in ("materialize", "gc", "trim", "scrub"):
        (document,) = documents((KUBERNETES / "base" / f"{name}.yaml").read_text())
        arguments = expanded(pod_of(document)["containers"][0]["args"], settings)
        if name == "materialize":  # to its end, and at no port of this machine
            arguments = [each for each in arguments if "metrics" not in each] + ["--once"]
        VERBS[name].main(arguments[1:], standalone_mode=False)
        said[name] = capsys.readouterr().out
    assert '"marker": "1:4"' in said["materialize"]
    assert "4 markers are kept" in said["gc"]
    assert "deleted" in said["trim"]
    assert "nothing is damaged" in said["scrub"]


# Docker.


def test_the_image_is_built_from_files_that_are_there() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    allowed = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in allowed if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    (constraints,) = re.findall(r"--constraint (\S+)", text)
    assert constraints in kept
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    assert (
        set(extras.split(","))
        <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )
    (user,) = re.findall(r"^USER (\d+):\d+$", text, re.M)
    (document,) = documents((KUBERNETES / "base" / "gc.yaml").read_text())
    assert pod_of(document)["securityContext"]["runAsUser"] == int(user)


# Locks.


def test_every_list_of_requirements_is_resolved_and_no_lock_has_what_another_brings() -> None:
    requirements, script = ROOT / "requirements", (ROOT / "scripts" / "lock.sh").read_text()
    lists = sorted(path.name for path in requirements.glob("*.in"))
    assert "clouds.in" in lists
    assert [name for name in lists if f"requirements/{name}" not in script] == []
    pins = {
        name: set(re.findall(r"^([a-z0-9-]+)==", (requirements / name).read_text(), re.M))
        for name in ("cpu.txt", "clouds.txt")
    }
    assert pins["clouds.txt"]
    assert not pins["clouds.txt"] & pins["cpu.txt"], "its venv stands beside .venv"


# Prometheus.

RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())


def test_alerts_ask_for_metrics_that_exist_and_say_what_to_do() -> None:
    known = {
        name
        for metric in (*TRAINER_METRICS.values(), *METRICS.values(), *FOLLOWER_METRICS.values())
        for name in metric.series
    }
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        asked = set(re.findall(r"\bstream_ckpt_\w+", rule["expr"]))
        assert asked, rule["alert"]
        assert asked <= known, rule["alert"]
        assert "by (job" in rule["expr"], "jobs are told apart"
        assert rule["labels"].keys() == {"severity"}
        assert rule["annotations"].keys() == {"summary", "action"}


def test_every_condition_of_the_list_of_alerts_is_a_rule() -> None:
    """Each expression of docs/operations.md, by its metric: rules say ``absent`` in another way."""
    (rows,) = re.findall(
        r"^\| alert \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", (ROOT / "docs" / "operations.md").read_text(), re.M
    )
    listed = {name for line in rows.splitlines() for name in re.findall(r"\bstream_ckpt_\w+", line.split(" | ")[1])}
    asked = {
        name
        for group in RULES["groups"]
        for rule in group["rules"]
        for name in re.findall(r"\bstream_ckpt_\w+", rule["expr"])
    }
    assert "stream_ckpt_follower_doubted_blocks" in listed
    assert listed <= asked


def test_what_promtool_is_asked_is_of_these_rules() -> None:
    """promtool may be missing here: what it is asked is looked at all the same."""
    tests = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yml").read_text())["tests"]
    rules = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
    tried = [each for test in tests for each in test["alert_rule_test"]]
    assert {each["alertname"] for each in tried} <= rules.keys()
    for each in tried:
        for alert in each["exp_alerts"]:
            assert alert["exp_annotations"].keys() == rules[each["alertname"]]["annotations"].keys()
    fired = {each["alertname"] for each in tried if each["exp_alerts"]}
    assert {rule for rule in rules if "Replica" in rule} | {"StreamCkptNoMarker", "StreamCkptRowsDiffer"} <= fired


def test_prometheus_takes_the_rules_and_they_fire_as_they_should() -> None:
    promtool = tool("promtool")
    run(promtool, "check", "rules", "rules.yml", cwd=DEPLOY / "prometheus")
    run(promtool, "test", "rules", "rules_test.yml", cwd=DEPLOY / "prometheus")
