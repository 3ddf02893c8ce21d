#!/usr/bin/env bash
# Ask those who will read deploy/: kustomize, the schemas of released Kubernetes, systemd, Prometheus, hadolint.
# `make deploy-check` calls it. Nothing is started, and no cluster is asked.
# usage: check_deploy.sh VENV
set -euo pipefail
cd "$(dirname "$0")/.."
readonly venv=$1 versions="1.29 1.33 1.37"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# WHAT HOW: a tool that is missing fails the check
need() {
  command -v "$1" >/dev/null || { echo "deploy-check: $1 is missing: $2" >&2; exit 1; }
}

build() {
  if command -v kubectl >/dev/null; then kubectl kustomize "$1"; else kustomize build "$1"; fi
}

command -v kubectl >/dev/null || need kustomize "https://kubectl.docs.kubernetes.io/installation/kustomize/"
need systemd-analyze "apt-get install -y systemd"
need promtool "apt-get install -y prometheus"

cp -r deploy/kubernetes "$scratch/kubernetes"
mkdir "$scratch/kubernetes/all"
{
  echo "resources: [../base]"
  echo "components:"
  for folder in deploy/kubernetes/components/*/; do echo "  - ../components/$(basename "$folder")"; done
} >"$scratch/kubernetes/all/kustomization.yaml"
for overlay in base example all; do
  build "$scratch/kubernetes/$overlay" >"$scratch/$overlay.yaml"
  for version in $versions; do
    "$venv/bin/kubernetes-validate" --strict --quiet -k "$version" "$scratch/$overlay.yaml"
    echo "kubernetes $version: $overlay, $(grep -c '^kind:' "$scratch/$overlay.yaml") objects"
  done
done

for unit in deploy/systemd/*@.*; do
  name=$(basename "$unit")
  sed 's#/opt/stream-ckpt/bin/stream-ckpt#/bin/true#' "$unit" >"$scratch/${name/@./@job.}" # verify looks for the program
done
said=$(cd "$scratch" && systemd-analyze verify ./*@job.* 2>&1)
[ -z "$said" ] || { echo "$said" >&2; exit 1; }
echo "$(systemd-analyze --version | head -1): $(ls deploy/systemd/*@.* | wc -l) units"

(cd deploy/prometheus && promtool check rules rules.yml && promtool test rules rules_test.yml)
"$venv/bin/hadolint" deploy/docker/Dockerfile
echo "$("$venv/bin/hadolint" --version): Dockerfile"
