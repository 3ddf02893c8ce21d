#!/usr/bin/env bash
# Start a Slurm of one machine, train on it through TorchX, kill the ranks, and see the job go on: first by itself (the
# scheduler requeues it), then launched again on three ranks. Everything lives in one folder and ends with this script.
# usage: scripts/slurm_trial.sh [FOLDER]        (Debian: apt-get install slurm-wlm munge)
# The environment of the project must be active: python, torchx and stream-ckpt are taken from PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly root=$PWD folder=$(realpath -m "${1:-slurm-trial}") user=$(id -un)
readonly waits_s=180 # for each thing that has to happen

die() {
  printf 'slurm_trial: %s\n' "$@" >&2
  exit 1
}

say() { printf '== %s\n' "$@"; }

for tool in munged slurmctld slurmd sbatch torchx stream-ckpt; do
  command -v "$tool" >/dev/null || die "$tool is missing: apt-get install slurm-wlm munge, and activate the environment"
done
[ ! -e "$folder" ] || die "$folder exists: name another folder"
mkdir -p "$folder"/{state,spool,work,home}
chmod 0700 "$folder"

stop() {
  for name in slurmd slurmctld munged; do
    [ ! -s "$folder/$name.pid" ] || kill "$(cat "$folder/$name.pid")" 2>/dev/null || true
  done
}
trap stop EXIT

free_port() { python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

# What comes after --, until it succeeds.
wait_for() {
  local what=$1 end=$((SECONDS + waits_s))
  shift
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || die "$what: not within $waits_s s (logs in $folder)"
    sleep 0.5
  done
}

start_slurm() {
  head -c 1024 /dev/urandom >"$folder/munge.key"
  chmod 0600 "$folder/munge.key"
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>"$folder/munged.err"
  cat >"$folder/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=8 RealMemory=16000 State=UNKNOWN
PartitionName=trial Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  export SLURM_CONF=$folder/slurm.conf
  slurmctld -c
  slurmd -c
  wait_for "the node is idle" bash -c 'sinfo --noheader --format %t | grep -qx idle'
}

# The newest marker and how many ranks wrote it, such as "1:7 2".
newest() {
  stream-ckpt list "file://$folder/ckpt" --json |
    python -c 'import json, sys; m = json.load(sys.stdin)["markers"][-1]; print(m["marker"], m["ranks"])'
}

# Prints the number of the job.
launch() {
  local handle
  handle=$(HOME=$folder/home torchx run -s slurm -cfg partition=trial "$root/torchx_components/train.py:dlrm" \
    --script "$root/recipes/train_dlrm.py" -j "$1" --cpu 2 --memMB 4000 --max_retries 1 --env GLOO_SOCKET_IFNAME=lo -- \
    --synthetic small --marker_every 20 --limit_train_batches 1000000 --log_every 1000000 \
    --stream_ckpt "file://$folder/ckpt" 2>>"$folder/torchx.log" | grep '^slurm://') || true
  [ -n "$handle" ] || die "torchx run failed: $folder/torchx.log"
  echo "${handle##*/}"
}

# Whether a job has said something, to the file that TorchX names.
has_said() { grep -q "$2" "slurm-$1-trainer-0.err" "slurm-$1-trainer-0.out"; }

kill_ranks() { pgrep -f "train_dlrm.py.*$folder/ckpt" | while read -r pid; do
  if tr '\0' '\n' <"/proc/$pid/environ" | grep -q '^LOCAL_RANK='; then kill -9 "$pid"; fi
done; }

cd "$folder/work"
say "starting Slurm in $folder"
start_slurm
say "$(sinfo --version): $(sinfo --noheader)"

job=$(launch 1x2)
wait_for "markers of job $job" has_said "$job" 'marker 1:3 committed'
say "job $job trains on 2 ranks; its ranks are killed at $(date +%T)"
kill_ranks
wait_for "job $job is requeued and restores" has_said "$job" 'restored marker 1:'
say "job $job was requeued and goes on, $(date +%T): $(grep -h 'restored marker' "slurm-$job-trainer-0.err" | tail -1)"
wait_for "new markers of job $job" has_said "$job" 'marker 2:[0-9]* committed'
scancel "$job"
wait_for "job $job ends" bash -c "! squeue --noheader | grep -q ' $job '"
say "job $job canceled; newest marker and its ranks: $(newest)"

job=$(launch 1x3)
wait_for "job $job restores" has_said "$job" 'restored marker 2:'
wait_for "markers of job $job" has_said "$job" 'marker 3:[0-9]* committed'
say "job $job on 3 ranks: $(grep -h 'restored marker' "slurm-$job-trainer-0.err" | tail -1)"
scancel "$job"
wait_for "job $job ends" bash -c "! squeue --noheader | grep -q ' $job '"
[ "$(newest | cut -d' ' -f2)" = 3 ] || die "the newest marker is not of 3 ranks: $(newest)"
say "done; newest marker and its ranks: $(newest)"
