"""Compute the needs of a job: bandwidth, disks, memory, and the cost of a failure. A pure model: no I/O, no torch.

``stream-ckpt plan`` prints it. ``benchmarks/scale`` measures its unit costs and compares it with real jobs. Names
contain the units: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` per second. docs/sizing.md explains each line for
operators.
"""

from torchrec_stream_ckpt.extras.sizing.bills import Bill, Bills, Share, bills
from torchrec_stream_ckpt.extras.sizing.failure import (
    RankMemory,
    RestoreTime,
    commit_time,
    loss_window,
    rank_memory,
    restore_time,
    sweep_time,
)
from torchrec_stream_ckpt.extras.sizing.folds import FoldLoad, fold_load
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, TableLoad, UnitCosts, Workload, optimizer_states
from torchrec_stream_ckpt.extras.sizing.keep import (
    BrokerNeed,
    broker_need,
    log_bytes,
    store_bytes,
    store_write_bytes_per_s,
)
from torchrec_stream_ckpt.extras.sizing.needs import Plan, plan
from torchrec_stream_ckpt.extras.sizing.requests import Requests, fold_requests, marker_requests
from torchrec_stream_ckpt.extras.sizing.stream import (
    StepCost,
    drain_bytes,
    drain_frames,
    host_time,
    step_cost,
    step_time,
    stream_bytes_per_s,
)
from torchrec_stream_ckpt.extras.sizing.touched import RateTouched, Touched, ZipfTouched

__all__ = [
    "Bill",
    "Bills",
    "BrokerNeed",
    "Deployment",
    "FoldLoad",
    "Plan",
    "RankMemory",
    "RateTouched",
    "Requests",
    "RestoreTime",
    "Share",
    "StepCost",
    "TableLoad",
    "Touched",
    "UnitCosts",
    "Workload",
    "ZipfTouched",
    "bills",
    "broker_need",
    "commit_time",
    "drain_bytes",
    "drain_frames",
    "fold_load",
    "fold_requests",
    "host_time",
    "log_bytes",
    "loss_window",
    "marker_requests",
    "optimizer_states",
    "plan",
    "rank_memory",
    "restore_time",
    "step_cost",
    "step_time",
    "store_bytes",
    "store_write_bytes_per_s",
    "stream_bytes_per_s",
    "sweep_time",
]
