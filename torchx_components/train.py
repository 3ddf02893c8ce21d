"""``train.dlrm``: a recipe under torchrun, on any scheduler of TorchX."""

# No annotations from __future__, and old spellings of types: TorchX 0.7.0 reads the arguments from them.
from typing import Dict, List, Optional

import torchx.specs as specs
from torchx.components import dist

from torchrec_stream_ckpt.components import roles


def dlrm(
    *recipe_args: str,
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
) -> specs.AppDef:
    """Train a recipe under torchrun. Its own flags follow --.

    A restarted job, on any number of ranks, continues from the newest committed marker.
    Example: torchx run -s local_cwd torchx_components/train.py:dlrm -j 1x2 -- --synthetic small --stream_ckpt
    file://ckpt

    Args:
        recipe_args: flags of the recipe, such as --stream_ckpt URI --store URL --restore latest. To give a flag
            twice, write --flag=VALUE, because torchx run accepts --flag VALUE only once
        script: the recipe, a path in the image (local_cwd and Slurm: on the machine); by default the train_dlrm that is
            installed with torchrec_stream_ckpt
        j: [MIN:]NODESxPROCS; with MIN the job is elastic: it continues with MIN nodes and grows up to NODES
        image: container image that holds the recipe and torchrec_stream_ckpt; local_cwd and Slurm use none
        name: EXPERIMENT/RUN, EXPERIMENT/ or /RUN; the default name of the run is that of the script
        h: a named resource of TorchX; takes precedence over cpu, gpu and memMB
        cpu: CPUs of a node; 0: one per process, or 8 with a GPU
        gpu: GPUs of a node; 0 trains on CPUs
        memMB: memory of a node in MB, shared memory included; 0: 4096 per process, or 32768 with a GPU
        efa: EFA devices of a node (AWS); 0: those of the named resource h, if it has any
        env: KEY=VALUE,KEY=VALUE for the processes; on Slurm no value may contain a comma
        mounts: type=bind,src=PATH,dst=PATH[,readonly] (volume, device): what a container can access on its machine
        max_retries: how often the scheduler restarts a failed job
        max_restarts: how often torchrun restarts failed workers, within the job; -1: 100 times if -j is elastic,
            otherwise never
        rdzv_port: port on the first node at which the nodes meet
        rdzv_conf: KEY=VALUE,KEY=VALUE for the rendezvous of torchrun; an elastic job has shorter waits by default
    """
    smallest, nodes, procs = roles.parse_nodes(j)
    roles.check_flags(recipe_args, nodes * procs)
    is_elastic = smallest < nodes
    restarts = max_restarts if max_restarts >= 0 else roles.ELASTIC_RESTARTS * is_elastic
    conf = rdzv_conf or (roles.ELASTIC_RENDEZVOUS if is_elastic else "")
    cpus, mem_mb = roles.node_size(procs, cpu=cpu, gpu=gpu, mem_mb=memMB)
    app = dist.ddp(
        *recipe_args,
        script=script or None,
        m=None if script else roles.RECIPE,
        image=image,
        name=name,
        h=h,
        cpu=cpus,
        gpu=gpu,
        memMB=mem_mb,
        j=j,
        env=env,
        max_retries=max_retries,
        rdzv_port=rdzv_port,
        mounts=mounts,
    )
    roles.check_gpus(app.roles[0], procs)
    roles.add_efa(app.roles[0], efa)
    app.roles[0].name = "trainer"
    if restarts:
        roles.restart_within(app, restarts)
    if conf:
        roles.check_rendezvous(conf)
        roles.add_to_torchrun(app, "--rdzv_conf", conf)
    return app
