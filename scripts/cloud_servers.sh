#!/usr/bin/env bash
# Put the stand-ins for Google's and Azure's object stores into a venv: fake-gcs-server, built with Go, and Azurite, which
# runs under Node. Both only serve on loopback, for tests.
# usage: cloud_servers.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
readonly venv=$PWD/$1
# BSD-2-Clause and MIT. Newer Azurites want a Node that Debian 12 does not have.
readonly gcs=github.com/fsouza/fake-gcs-server@v1.56.1 azurite=azurite@3.35.0

go=$(command -v go || true)
[ -n "$go" ] || [ ! -x /usr/local/go/bin/go ] || go=/usr/local/go/bin/go
if [ -z "$go" ]; then
  echo "cloud-servers: Go is missing, and fake-gcs-server is built with it: install Go 1.21 or newer (https://go.dev/doc/install)" >&2
  exit 1
fi
GOBIN=$venv/bin "$go" install "$gcs"

command -v npm >/dev/null || bash scripts/apt_get.sh "npm with Node" npm
[ -f "$venv/package.json" ] || echo '{"private": true}' >"$venv/package.json"
npm install --prefix "$venv" --no-fund --no-audit --save-exact --ignore-scripts --silent "$azurite"
