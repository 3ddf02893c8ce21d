"""What ranks, pool workers and materializers import: by the server that they are forked from, before it forks any.

A name that is missing here costs every such process the import, up to seconds for torch.
"""

# ruff: noqa: F401

from __future__ import annotations

import gc
from multiprocessing import forkserver

import numpy.ma
import pytest  # the modules of tests, which the functions of ranks are in
import s3fs

import tests.faults.live
import tests.faults.materializer
import tests.jobs
import tests.pool
import tests.pressure
import tests.random_zoo
import tests.tiered
import tests.zoo
import tests.zoo_models
import torchrec_stream_ckpt.checkpointer
import torchrec_stream_ckpt.cli.main

# What is forked from this server, workers of a DataLoader too, is forked from it again, instead of from a new server.
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
gc.collect()
gc.freeze()  # nothing of it is garbage: a child's first full collection would take half a second, and copy every page
