#!/usr/bin/env bash
# What the servers of the tests and the demo need: a Java, and the jars of Kafka and of the S3 server (`java_tools.sh
# kafka s3proxy`), which Maven fetches once. Missing tools are installed (as root) or named, and then nothing runs: a
# test that is skipped in silence would count as passed.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly python=.venv/bin/python

# Here and not in the first test that needs them: a slow download is no test that hangs.
for name in "$@"; do
  case $name in
    kafka) jars="from torchrec_stream_ckpt.extras.broker.runtime import KAFKA as jars" ;;
    s3proxy) jars="from tests.s3.jars import S3PROXY as jars" ;;
    *) echo "java-tools: what is $name?" >&2 && exit 2 ;;
  esac
  folder=$("$python" -c "$jars; print(jars.folder)")
  if [ ! -d "$folder" ]; then
    # Debian's Maven brings a Java as well.
    command -v mvn >/dev/null || bash scripts/apt_get.sh Maven maven
    echo "java-tools: Maven fetches $name into $folder, once"
  fi
  "$python" - <<END
import sys

$jars
from torchrec_stream_ckpt.extras.broker.runtime import find_java
from torchrec_stream_ckpt.errors import StreamCkptError

try:
    find_java()
    jars.fetched()
except StreamCkptError as error:
    sys.exit(f"java-tools: {error}")
END
done
