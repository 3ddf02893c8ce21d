"""TorchX components: the recipes on one machine, Slurm, Kubernetes and AWS Batch (docs/launch.md).

    torchx run -s SCHEDULER torchx_components/train.py:dlrm -j 2x8 -- --stream_ckpt URI ...

This folder is installed as ``torchrec_stream_ckpt.components``, and must be imported by that name;
``python -m torchrec_stream_ckpt.components`` prints its path. There is no entry point ``torchx.components``, because a
package that registers one hides TorchX's own components (``dist.ddp``, ``utils.echo``, ...) from all other installed
packages.
"""

from importlib.util import find_spec

if find_spec("torchx") is None:
    hint = "pip install 'torchrec_stream_ckpt[torchx]'"
    raise ModuleNotFoundError(f"the components need TorchX, which is not installed: {hint}", name="torchx")
