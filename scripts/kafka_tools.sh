#!/usr/bin/env bash
# What the Kafka tests and demo need: a Java and Kafka's jars, which Maven fetches once. Missing tools are installed
# (as root) or named, and then nothing runs: a Kafka test that is skipped in silence would count as passed.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly python=.venv/bin/python
jars=$("$python" -c 'from torchrec_stream_ckpt.broker import runtime; print(runtime.cache_dir())')

if [ ! -d "$jars" ]; then
  # Debian's Maven brings a Java as well.
  command -v mvn >/dev/null || bash scripts/apt_get.sh Maven maven
  echo "kafka-tools: Maven fetches Kafka into $jars, once"
fi
# Here and not in the first test that needs them: a slow download is no test that hangs.
"$python" - <<'END'
import sys

from torchrec_stream_ckpt.broker.runtime import find_java, kafka_jars
from torchrec_stream_ckpt.errors import StreamCkptError

try:
    find_java()
    kafka_jars()
except StreamCkptError as error:
    sys.exit(f"kafka-tools: {error}")
END
