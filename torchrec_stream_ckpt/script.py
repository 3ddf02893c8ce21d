"""Calls for training scripts: choose a port for the ranks, join them, and print the library's log."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import warnings
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

_FIRST_PORT = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port for ``MASTER_PORT`` that is free on this host, for a script that starts its ranks by itself.

    The system gives the ports of a range of its own to outgoing connections, at any time: one that it has just named as
    free may be taken before rank 0 listens on it. So the port is below that range.
    """
    end = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    for _ in range(1000 if end > _FIRST_PORT else 0):
        port = _FIRST_PORT + secrets.randbelow(end - _FIRST_PORT)
        with socket.socket() as probe, suppress(OSError):  # another process listens there
            probe.bind(("", port))
            return port
    with socket.create_server(("", 0)) as probe:
        named: int = probe.getsockname()[1]
    return named


def init_ranks(backend: str = "gloo") -> tuple[int, int]:
    """Initialize the default process group. Without torchrun, this process becomes the only rank.

    Call ``torch.distributed.destroy_process_group()`` at the end of the script.

    Args:
        backend: As of ``torch.distributed.init_process_group``.

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
