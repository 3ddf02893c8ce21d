"""``service.materialize``: the materializer of a job's log as a separate job."""

# No annotations from __future__, and old spellings of types: TorchX 0.7.0 reads the arguments from them.
from typing import Dict, List, Optional

import torchx.specs as specs

from torchrec_stream_ckpt.components import roles


def materialize(
    *materialize_args: str,
    uri: str,
    store: str,
    image: str = "",
    name: str = "materialize",
    h: Optional[str] = None,
    cpu: int = 2,
    memMB: int = 4096,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 10,
    store_options: Optional[str] = None,
    kafka_options: Optional[str] = None,
    commit_key_file: Optional[str] = None,
) -> specs.AppDef:
    """Fold the log of a training job into a store, until it is canceled. Flags of stream-ckpt materialize follow --.

    It shares nothing with the training job: if either fails, ends or is canceled, the other continues. Run the same
    command again for a second materializer: they share the partitions of the log.
    Example: torchx run -s slurm torchx_components/service.py:materialize --uri kafka://k1:9092/job --store
    s3://ckpt/job

    Args:
        materialize_args: more flags of stream-ckpt materialize, such as --compact span4 --metrics-port 9500
        uri: the log, file://DIR, kafka://HOST:PORT,.../JOB or s3://BUCKET/PREFIX
        store: the store, file://DIR or s3://BUCKET/PREFIX
        image: container image that holds torchrec_stream_ckpt; it needs no torch. local_cwd and Slurm use none
        name: name of the job
        h: a named resource of TorchX; takes precedence over cpu and memMB
        cpu: CPUs
        memMB: memory in MB. A merge takes 800 at most; Kubernetes requests 1024 less than this
        env: KEY=VALUE,KEY=VALUE for the process; on Slurm no value may contain a comma
        mounts: type=bind,src=PATH,dst=PATH[,readonly] (volume, device): what a container can access on its machine
        max_retries: how often the scheduler restarts it after a failure; AWS Batch allows 10 at most
        store_options: file of key=value settings of an object store
        kafka_options: file of key=value settings of the Kafka client
        commit_key_file: file of the job's commit key
    """
    roles.check_uri(uri, "--uri")
    files = {"store_options": store_options, "kafka_options": kafka_options, "commit_key_file": commit_key_file}
    role = roles.materializer(
        uri,
        store,
        [*roles.access_options(files), *materialize_args],
        image=image,
        env=dict(env or {}),
        resource=specs.resource(cpu=cpu, gpu=0, memMB=memMB, h=h),
        replicas=1,
    )
    roles.check_command(role.args)
    role.max_retries = max_retries
    role.mounts = specs.parse_mounts(mounts) if mounts else []
    return specs.AppDef(name=name, roles=[role])
