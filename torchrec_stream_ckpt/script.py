"""Calls for training scripts: choose a port for the ranks, join them, and print the library's log."""

from __future__ import annotations

import logging
import os
import warnings

import torch.distributed as dist

from torchrec_stream_ckpt.util.ports import free_port as free_port


def init_ranks(backend: str = "gloo") -> tuple[int, int]:
    """Initialize the default process group. Without torchrun, this process becomes the only rank.

    Call ``torch.distributed.destroy_process_group()`` at the end of the script.

    Args:
        backend: As in ``torch.distributed.init_process_group``.

    Returns:
        The rank of this process, and the number of ranks.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def log_to_stderr(rank: int) -> None:
    """Print the library's log: one line per marker on rank 0, warnings on every rank.

    It configures Python's root logger, and hides the warnings that TorchRec gives in every job. A script with its
    own logging needs only ``logging.getLogger("torchrec_stream_ckpt").setLevel(logging.INFO)``.

    Args:
        rank: The rank of this process.
    """
    logging.basicConfig(level=logging.ERROR, format="%(message)s", force=True)
    logging.getLogger("torchrec_stream_ckpt").setLevel(logging.WARNING if rank else logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")
