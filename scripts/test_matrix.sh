#!/usr/bin/env bash
# Run the tests under several stacks, each in its own environment; fails if one of them fails, and runs all the same.
# usage: test_matrix.sh VENV... -- [PYTEST_ARGS...]
set -euo pipefail
cd "$(dirname "$0")/.."
venvs=()
while [ "$1" != -- ]; do
  venvs+=("$1")
  shift
done
shift

# The packages that the adapter knows by heart, at the versions that are installed.
versions() {
  "$1" - <<'END'
from importlib.metadata import version

print(", ".join(f"{name} {version(name)}" for name in ("torch", "torchrec", "fbgemm-gpu-cpu")))
END
}

results=()
status=0
for venv in "${venvs[@]}"; do
  stack="$venv: $(versions "$venv/bin/python")"
  echo "test-matrix: $stack"
  if "$venv/bin/python" -m pytest "$@"; then
    results+=("passed  $stack")
  else
    results+=("FAILED  $stack")
    status=1
  fi
done
printf 'test-matrix: %s\n' "${results[@]}"
exit "$status"
