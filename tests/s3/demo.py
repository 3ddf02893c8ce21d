"""Run the demo over a bucket: python -m tests.s3.demo [s3://BUCKET/PREFIX] [--keep] [--dir DIR]

Without a bucket, a server on loopback is started and stopped.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from recipes import demo
from tests.s3.server import KEY, SECRET, S3Server


def main(arguments: list[str]) -> int:
    if arguments and arguments[0].startswith("s3://"):
        return run(arguments[0], arguments[1:])
    with tempfile.TemporaryDirectory() as folder:
        server = S3Server(Path(folder))
        server.start()
        os.environ |= {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        try:
            return run(f"s3://{server.bucket}/demo", arguments)
        finally:
            server.kill()


def run(bucket: str, arguments: list[str]) -> int:
    sys.argv = [demo.__file__, "--bucket", bucket, *arguments]
    return demo.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
