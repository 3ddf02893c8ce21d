#!/usr/bin/env bash
# Resolve pyproject.toml into requirements/cpu.txt; versions stay as they are unless --upgrade is given.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly lock=requirements/cpu.txt
scratch=$(mktemp)
trap 'rm -f "$scratch"' EXIT
sed '/^#/d' "$lock" >"$scratch"
.venv/bin/python -m uv pip compile pyproject.toml --extra cpu --extra dev --extra jdk \
  --overrides requirements/overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-header --no-emit-index-url --quiet --output-file "$scratch" "$@" >/dev/null
{
  sed -n '/^#/!q;p' "$lock"
  cat "$scratch"
} >"$lock.new"
mv "$lock.new" "$lock"
