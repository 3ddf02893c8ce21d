"""What ranks, pool workers and materializers import: by the server that they are forked from, before it forks any.

A name that is missing here costs every such process the import, up to seconds for torch.
"""

# ruff: noqa: F401

from __future__ import annotations

import functools
import gc
from multiprocessing import forkserver

import botocore.session
import numpy.ma
import pytest  # the modules of tests, which the functions of ranks are in
import s3fs
from aiobotocore.httpsession import AIOHTTPSession

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

# Each client of a bucket reads 1 MB of JSON on S3 and all certificates of this machine: 0.13 s of CPU. Here all share
# them, as no test of S3 speaks TLS.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
botocore.session.Session().create_client("s3", "us-east-1", aws_access_key_id="nobody", aws_secret_access_key="none")
VERIFIED = AIOHTTPSession()._build_verify_context()
AIOHTTPSession._build_verify_context = lambda _: VERIFIED

# What is forked from this server, workers of a DataLoader too, is forked from it again, instead of from a new server.
forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
gc.collect()
gc.freeze()  # nothing of it is garbage: a child's first full collection would take half a second, and copy every page
