#!/usr/bin/env bash
# Bring a Debian package: install it where we are root, else stop with the one line that brings it.
# usage: apt_get.sh WHAT PACKAGE
set -euo pipefail
readonly what=$1 package=$2
readonly line="apt-get update && apt-get install -y --no-install-recommends $package"

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  echo "$what is missing: $line"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # What it says while all goes well is of no interest here; errors come on the other stream.
  exec apt-get install -y -qq --no-install-recommends "$package" >/dev/null
fi
echo "$what is missing. As root: $line" >&2
exit 1
