#!/usr/bin/env bash
# Resolve pyproject.toml into every lock of requirements/; versions stay as they are unless --upgrade is given.
# cpu.txt is what pyproject.toml and cpu.in say, cpu-NAME.txt the same with what NAME.txt puts in its place. docs.txt is docs.in, deploy.txt is deploy.in.
# clouds.txt is clouds.in with the versions of cpu.txt, less what cpu.txt has: its venv stands beside .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly python=.venv/bin/python
scratch=$(mktemp)
trap 'rm -f "$scratch"' EXIT

# LOCK, and what to resolve
compile() {
  local lock=$1
  shift
  sed '/^#/d' "$lock" >"$scratch"
  "$python" -m uv pip compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --no-header --no-emit-index-url --quiet --output-file "$scratch" "$@" >/dev/null
  {
    sed -n '/^#/!q;p' "$lock"
    cat "$scratch"
  } >"$lock.new"
  mv "$lock.new" "$lock"
}

# LOCK, another lock of which it has nothing, and what to resolve
compile_beside() {
  local lock=$1 other=$2
  shift 2
  compile "$lock" --no-annotate --constraint "$other" "$@"
  grep -vxF -f <(grep -v '^#' "$other") "$lock" >"$lock.new"
  mv "$lock.new" "$lock"
}

# LOCK and more options for uv
resolve() {
  local lock=$1
  shift
  compile "$lock" pyproject.toml requirements/cpu.in --extra cpu --extra dev --extra jdk --extra s3 --extra metrics --extra redis --extra export \
    --extra tensorboard --extra torchx --extra bench --overrides requirements/overrides.txt "$@"
}

resolve requirements/cpu.txt "$@"
for lock in requirements/cpu-*.txt; do
  name=${lock#requirements/cpu-}
  resolve "$lock" --overrides "requirements/$name" "$@"
done
compile requirements/docs.txt requirements/docs.in "$@"
compile requirements/deploy.txt requirements/deploy.in "$@"
compile_beside requirements/clouds.txt requirements/cpu.txt requirements/clouds.in "$@"
