"""``pipeline.stream_ckpt``: a trainer, the materializer of its log, and for trials a broker between them."""

# No annotations from __future__, and old spellings of types: TorchX 0.7.0 reads the arguments from them.
from typing import Dict, List, Optional

import torchx.specs as specs

from torchrec_stream_ckpt.components import roles, train


def stream_ckpt(
    *recipe_args: str,
    uri: str,
    store: str,
    script: str = "",
    j: str = "1x2",
    image: str = "",
    name: str = "/",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    efa: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    max_restarts: int = -1,
    rdzv_port: int = 29500,
    rdzv_conf: Optional[str] = None,
    materializers: int = 1,
    materializer_cpu: int = 2,
    materializer_memMB: int = 4096,
    store_options: Optional[str] = None,
    kafka_options: Optional[str] = None,
    commit_key_file: Optional[str] = None,
    broker: Optional[str] = None,
) -> specs.AppDef:
    """Train a recipe and fold its stream into a store.

    For trials: the materializer shares the trainer's job, and follows the log until the job ends. In production, run it
    as a separate job (service.py:materialize).
    Example: torchx run -s local_cwd torchx_components/pipeline.py:stream_ckpt --uri file://ckpt/log
    --store file://ckpt/store -j 1x2 -- --synthetic small

    Args:
        recipe_args: more flags of the recipe, such as --marker_every 50; --stream_ckpt and --store are derived
            from --uri and --store
        uri: the log, file://DIR, kafka://HOST:PORT,.../JOB or s3://BUCKET/PREFIX; a file:// log must be a folder that
            all roles can access
        store: the store, file://DIR or s3://BUCKET/PREFIX
        script: the recipe, a path in the image (local_cwd and Slurm: on the machine); by default the train_dlrm that is
            installed with torchrec_stream_ckpt
        j: [MIN:]NODESxPROCS of the trainer; with MIN it is elastic
        image: container image that holds the recipe and torchrec_stream_ckpt; local_cwd and Slurm use none
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN; the default name of the run is that of the script
        h: a named resource of TorchX for the trainer; takes precedence over cpu, gpu and memMB
        cpu: CPUs of a trainer's node; 0: one per process, or 8 with a GPU
        gpu: GPUs of a trainer's node; 0 trains on CPUs
        memMB: memory of a trainer's node in MB, shared memory included; 0: 4096 per process, or 32768 with a GPU
        efa: EFA devices of a trainer's node (AWS); 0: those of the named resource h, if it has any
        env: KEY=VALUE,KEY=VALUE for all roles; on Slurm no value may contain a comma
        mounts: type=bind,src=PATH,dst=PATH[,readonly] (volume, device), for all roles
        max_retries: how often the scheduler restarts a failed role
        max_restarts: how often torchrun restarts failed workers, within the job; -1: 100 times if -j is elastic,
            otherwise never
        rdzv_port: port on the first node at which the nodes meet
        rdzv_conf: KEY=VALUE,KEY=VALUE for the rendezvous of torchrun; an elastic job has shorter waits by default
        materializers: replicas; a second one is harmless, but saves no time; use more cores (--engine)
        materializer_cpu: CPUs of each replica
        materializer_memMB: memory of each replica in MB
        store_options: file of key=value settings of an object store, for all roles
        kafka_options: file of key=value settings of the Kafka client, for all roles
        commit_key_file: file of the job's commit key, for all roles
        broker: folder of a Kafka broker that this job starts, for trials on one machine; --uri is then
            kafka://127.0.0.1:PORT/JOB
    """
    roles.check_uri(uri, "--uri")
    for flag in ("--stream_ckpt", "--store"):
        if roles.values_of(flag, recipe_args):
            roles.refuse(
                f"{flag} must not follow --: pass --uri and --store to the component, which gives them to all roles"
            )
    if materializers < 1:
        roles.refuse(
            f"--materializers must be at least 1, got {materializers}; without a materializer, use train.py:dlrm"
        )
    files = {"store_options": store_options, "kafka_options": kafka_options, "commit_key_file": commit_key_file}
    given = {flag: path for flag, path in files.items() if path is not None}
    app = train.dlrm(
        *(f"--stream_ckpt={uri}", f"--store={store}"),
        *(f"--{flag}={path}" for flag, path in given.items()),
        *recipe_args,
        script=script,
        j=j,
        image=image,
        name=name,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        efa=efa,
        env=dict(env or {}),
        mounts=mounts,
        max_retries=max_retries,
        max_restarts=max_restarts,
        rdzv_port=rdzv_port,
        rdzv_conf=rdzv_conf,
    )
    resource = specs.Resource(cpu=materializer_cpu, gpu=0, memMB=materializer_memMB)
    options = roles.access_options(given)
    materializer = roles.materializer(
        uri, store, options, image=image, env=dict(env or {}), resource=resource, replicas=materializers
    )
    roles.share_no_fate(materializer)
    app.roles.append(materializer)
    if broker is not None:
        if roles.parse_nodes(j)[1] > 1:
            roles.refuse(f"--broker answers only on loopback, so -j must be one node, 1xPROCS, got {j}")
        for role in app.roles:
            roles.wait_for_broker(role, broker)
        app.roles.append(roles.broker(broker, uri, image=image, env=dict(env or {}), resource=resource))
    for role in app.roles[1:]:
        role.max_retries = max_retries
        role.mounts = specs.parse_mounts(mounts) if mounts else []
    return app
