"""Building blocks of the components: checks of their arguments, and the roles of a job.

A mistake of the user is a ``ComponentValidationException``: the only error of a component that ``torchx run`` shows as
a message, without a traceback.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NoReturn

from torchx.specs import AppDef, Resource, RetryPolicy, Role
from torchx.specs.finder import ComponentValidationException
from torchx.specs.named_resources_aws import EFA_DEVICE

from torchrec_stream_ckpt.cli.main import mistake_in

RECIPE = "torchrec_stream_ckpt.recipes.train_dlrm"
"""The module that is started if the user names no script."""

ELASTIC_RESTARTS = 100
"""Default number of failures that an elastic job survives: a node that joins or leaves costs at most one."""

ELASTIC_RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"
"""Default rendezvous: a dead node is given up after 10 s, and once there are enough nodes, 5 s are spent waiting for
more."""

CPUS_A_PROCESS, CPUS_A_GPU_PROCESS = 1, 8
"""CPUs of a trainer's node per process. With a GPU, loading and the threads that send rows have separate cores."""

MEM_MB_A_PROCESS, MEM_MB_A_GPU_PROCESS = 4096, 32768
"""Memory of a trainer's node per process, shared memory included."""

_BROKER_WAIT_S = 300
"""Longest wait for the broker of a trial, in seconds: on the first start it is downloaded."""


def refuse(message: str) -> NoReturn:
    """End ``torchx run`` with ``message``."""
    raise ComponentValidationException(message)


def parse_nodes(j: str) -> tuple[int, int, int]:
    """Parse the argument ``-j``.

    Args:
        j: ``[MIN:]NODESxPROCS``.

    Returns:
        The smallest and the largest number of nodes, and the processes of a node.
    """
    found = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})x(\d{1,6})", j)
    if found is None:
        refuse(f"-j must be [MIN:]NODESxPROCS, got {j}: 1x2 is one node of two processes, 1:3x8 one to three of eight")
    nodes, procs = int(found[2]), int(found[3])
    smallest = int(found[1]) if found[1] is not None else nodes
    if not 1 <= smallest <= nodes or procs < 1:
        refuse(f"-j {j}: MIN, NODES and PROCS must be at least 1, and MIN at most NODES, such as 1:3x8")
    return smallest, nodes, procs


def values_of(flag: str, recipe_args: Sequence[str]) -> list[str]:
    """Return the values of a flag of the recipe, in both spellings: ``--flag VALUE`` and ``--flag=VALUE``."""
    found = [arg.removeprefix(f"{flag}=") for arg in recipe_args if arg.startswith(f"{flag}=")]
    return found + [value for arg, value in pairwise(recipe_args) if arg == flag]


def check_flags(recipe_args: Sequence[str], ranks: int) -> None:
    """Refuse flags here that every rank of the job would refuse, minutes later and on another machine."""
    for size in values_of("--batch_size", recipe_args):
        if size.isdecimal() and int(size) < ranks:
            refuse(f"--batch_size must be at least the number of ranks, {ranks}, got {size}: it is the global batch")
    for uri in values_of("--stream_ckpt", recipe_args):
        check_uri(uri, "--stream_ckpt")
        if uri.startswith("kafka://") and not values_of("--store", recipe_args):
            refuse(f"--stream_ckpt {uri} needs --store URL for the dense state, such as --store s3://BUCKET/JOB")


def check_uri(uri: str, flag: str) -> None:
    if not re.match(r"file://.|(kafka|s3|gs|az|abfs)://[^/]+/.", uri):
        refuse(f"{flag} must be file://DIR, kafka://HOST:PORT,.../JOB or s3://BUCKET/PREFIX (gs, az), got {uri}")


def check_rendezvous(conf: str) -> None:
    if not re.fullmatch(r"\w+=[^,=\s]+(,\w+=[^,=\s]+)*", conf):
        refuse(f"--rdzv_conf must be KEY=VALUE,KEY=VALUE, such as {ELASTIC_RENDEZVOUS}, got {conf}")


def check_gpus(role: Role, procs: int) -> None:
    """Refuse more processes than GPUs; a node without GPUs trains on CPUs."""
    gpus = role.resource.gpu
    if 0 < gpus < procs:
        refuse(f"{procs} processes do not fit a node of {gpus} GPUs: pass -j NODESx{gpus}, or a larger --gpu or -h")


def node_size(procs: int, *, cpu: int, gpu: int, mem_mb: int) -> tuple[int, int]:
    """Return CPUs and MB of a trainer's node. A value of 0 is derived from its processes."""
    cpus = cpu or procs * (CPUS_A_GPU_PROCESS if gpu else CPUS_A_PROCESS)
    return cpus, mem_mb or procs * (MEM_MB_A_GPU_PROCESS if gpu else MEM_MB_A_PROCESS)


def add_efa(role: Role, efa: int) -> None:
    """Request EFA devices; 0 keeps the devices of a named resource of TorchX."""
    if efa < 0:
        refuse(f"--efa must be the number of EFA devices of a node, 0 or more, got {efa}")
    if efa:
        role.resource.devices[EFA_DEVICE] = efa


def access_options(files: Mapping[str, str | None]) -> list[str]:
    """Return flags of ``stream-ckpt`` for the given files, which are keyed by the names of the recipes' flags."""
    return [part for flag, path in files.items() if path for part in (f"--{flag.replace('_', '-')}", path)]


def check_command(arguments: Sequence[str]) -> None:
    """Refuse a call of ``stream-ckpt`` here that it would refuse on another machine."""
    if (mistake := mistake_in(arguments)) is not None:
        refuse(f"stream-ckpt {arguments[0]}: {mistake}")


def share_no_fate(role: Role) -> None:
    """Let a role fail alone, if the scheduler supports it: on Volcano its pods restart nothing, and are optional."""
    role.retry_policy, role.min_replicas = RetryPolicy.REPLICA, 0


def add_to_torchrun(app: AppDef, *options: str) -> None:
    """Give ``torchrun`` options for which ``dist.ddp`` has no argument.

    They are not passed by its environment (``PET_RDZV_CONF``), because Slurm cuts the value of a variable at its
    commas.
    """
    role = app.roles[0]
    command = role.args[-1]
    assert command.startswith("torchrun "), f"this version of TorchX starts an unknown command: {command}"
    role.args[-1] = f"torchrun {shlex.join(options)} {command.removeprefix('torchrun ')}"


def restart_within(app: AppDef, restarts: int) -> None:
    """Let ``torchrun`` start failed workers again, up to ``restarts`` times.

    It keeps one store for its own rendezvous and for the workers' process groups, under the same keys in every attempt:
    restarted ranks read addresses of dead ones, and fail or hang (observed with torch 2.14.1; see also
    https://github.com/pytorch/pytorch/issues/135712). With the environment variable, each attempt has a separate store.
    """
    add_to_torchrun(app, "--max_restarts", str(restarts))
    app.roles[0].env.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def materializer(
    uri: str, store: str, options: Sequence[str], *, image: str, env: dict[str, str], resource: Resource, replicas: int
) -> Role:
    """Return the role that folds the log into the store."""
    return Role(
        name="materializer",
        image=image,
        entrypoint="stream-ckpt",
        args=["materialize", uri, "--store", store, *options],
        env=env,
        num_replicas=replicas,
        resource=resource,
    )


def broker(folder: str, uri: str, *, image: str, env: dict[str, str], resource: Resource) -> Role:
    """Return the role that runs a Kafka broker on loopback; the broker ends with the role."""
    found = re.fullmatch(r"kafka://(?:127\.0\.0\.1|localhost):(\d{1,5})/.+", uri)
    if found is None:
        refuse(f"--broker requires --uri kafka://127.0.0.1:PORT/JOB, got {uri}")
    start = shlex.join(["stream-ckpt", "broker", "start", "--dir", folder, "--port", found[1], "--with-parent"])
    return Role(
        name="broker",
        image=image,
        entrypoint="bash",
        args=["-c", f"{start} && exec sleep infinity"],  # the command ends, the broker keeps running
        env=env,
        num_replicas=1,
        resource=resource,
    )


def wait_for_broker(role: Role, folder: str) -> None:
    """Delay a role until the broker of a trial answers."""
    status = shlex.join(["stream-ckpt", "broker", "status", "--dir", folder])
    wait = f"timeout {_BROKER_WAIT_S} bash -c {shlex.quote(f'until {status} >/dev/null; do sleep 1; done')}"
    command = role.args[-1] if role.entrypoint == "bash" else shlex.join([role.entrypoint, *role.args])
    role.entrypoint, role.args = "bash", ["-c", f"{wait} && {command}"]
