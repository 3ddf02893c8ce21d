"""Where the jars of the S3 server are."""

from __future__ import annotations

from pathlib import Path

from torchrec_stream_ckpt.extras.broker.runtime import Jars

S3PROXY = Jars(Path(__file__).with_name("pom.xml"), "s3proxy")
