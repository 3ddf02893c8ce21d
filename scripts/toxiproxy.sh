#!/usr/bin/env bash
# Build Toxiproxy with Go, once, into the user's cache, and print where it is. Without Go: exit status 3 and the reason.
set -euo pipefail
readonly version=v2.5.0
readonly folder=${XDG_CACHE_HOME:-$HOME/.cache}/torchrec_stream_ckpt/toxiproxy-$version

if [ ! -x "$folder/server" ]; then
  go=$(command -v go || true)
  [ -n "$go" ] || [ ! -x /usr/local/go/bin/go ] || go=/usr/local/go/bin/go
  if [ -z "$go" ]; then
    echo "Go is not installed, and Toxiproxy is built with it" >&2
    exit 3
  fi
  mkdir -p "$folder"
  # Into a folder of its own first: two runs at once must not see half a program.
  scratch=$(mktemp -d "$folder/build-XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  GOBIN=$scratch "$go" install "github.com/Shopify/toxiproxy/v2/cmd/server@$version" >&2
  mv "$scratch/server" "$folder/server"
fi
echo "$folder/server"
