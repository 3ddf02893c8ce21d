#!/usr/bin/env bash
# Make a folder hold the versions of a lock and this project, editable. `make setup` and `make test-matrix` call it.
# usage: setup.sh LOCK VENV
#
# Nothing is resolved here: the lock is complete, so every install runs with --no-deps. That also keeps out the CUDA
# wheel fbgemm-gpu, which torchrec asks for and which holds the same module as fbgemm-gpu-cpu (pyproject.toml says more).
set -euo pipefail
cd "$(dirname "$0")/.."
readonly lock=$1 venv=$2 wanted=3.11

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# The Python that PYTHON names, or the first one of the usual names that is a 3.11.
find_python() {
  local name version found="" names=(python3.11 python3 python)
  [ -z "${PYTHON:-}" ] || names=("$PYTHON")
  for name in "${names[@]}"; do
    version=$(version_of "$name")
    [ "$version" != "$wanted" ] || { command -v "$name"; return; }
    found+="${found:+, }$name is ${version:-missing}"
  done
  die "Python $wanted is needed: the pinned versions were resolved and tested with it ($found)" \
    "On Debian 12: apt-get install -y python3.11-venv" \
    "Elsewhere name one: make setup PYTHON=/path/to/python3.11"
}

make_venv() {
  local python
  python=$(find_python)
  # Debian keeps this module in a package of its own; a broken venv would be left behind without it.
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    [ "$("$python" -c 'import sys; print(sys.base_prefix)')" = /usr ] ||
      die "$python has no modules venv and ensurepip: name another one with make setup PYTHON=..."
    bash scripts/apt_get.sh "Python's module venv" python3.11-venv
  fi
  echo "setup: $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
}

"$venv/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
readonly python=$venv/bin/python
[ "$(version_of "$python")" = "$wanted" ] ||
  die "$venv holds Python $(version_of "$python"), $wanted is needed: rm -rf $venv, then make it again"
if compgen -G "$venv/lib/python$wanted/site-packages/fbgemm_gpu-[0-9]*.dist-info" >/dev/null; then
  die "$venv holds the CUDA wheel fbgemm-gpu, which overwrites fbgemm-gpu-cpu: rm -rf $venv, then make it again"
fi

echo "setup: $(grep -c '==' "$lock") packages of $lock (about 6 GB: torch from PyPI is the CUDA build; it runs on CPUs)"
"$python" -m pip install --quiet --disable-pip-version-check "$(grep -E '^uv==' "$lock")"
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
# Compiled now: where Python may not write bytecode, every process of the tests would compile torch for itself (20 s).
"$python" -m uv pip install --python "$python" --no-deps --compile-bytecode -r "$lock"
# The build backend is one of the locked packages as well: nothing unpinned is fetched for the build.
# By a path, not by an import hook: mypy and editors then find the types of the package as they do those of any other.
"$python" -m uv pip install --python "$python" --no-deps --no-build-isolation --config-settings editable_mode=compat -e .
# The installation has compiled the kernel if it could, without a word. This says so, or what is missing and what that costs.
"$python" torchrec_stream_ckpt/native/build.py
