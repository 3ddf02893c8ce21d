#!/usr/bin/env bash
# Start a Slurm of one machine, train on it through TorchX with a materializer in a job of its own, kill the materializer
# and then the ranks, and see each job go on without the other: the scheduler requeues it. Then launch the training again,
# on three ranks. Everything lives in one folder and ends with this script.
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

# Prints the number of the materializer's job.
launch_service() {
  local handle
  handle=$(HOME=$folder/home torchx run -s slurm -cfg partition=trial "$root/torchx_components/service.py:materialize" \
    --uri "file://$folder/ckpt" --store "file://$folder/store" --cpu 1 --memMB 2000 -- --json \
    2>>"$folder/torchx.log" | grep '^slurm://') || true
  [ -n "$handle" ] || die "torchx run failed: $folder/torchx.log"
  echo "${handle##*/}"
}

# Whether a job has said something, to the file that TorchX names.
has_said() { grep -q "$2" "slurm-$1-trainer-0.err" "slurm-$1-trainer-0.out"; }

# Whether the store has more markers than so many.
has_folded() { [ "$(find "$folder/store/manifests" -type f 2>/dev/null | wc -l)" -gt "$1" ]; }

# Whether a job runs, after so many requeues.
runs_after() { scontrol show job "$1" | grep -q "JobState=RUNNING" && scontrol show job "$1" | grep -q " Restarts=$2 "; }

kill_ranks() { pgrep -f "train_dlrm.py.*$folder/ckpt" | while read -r pid; do
  if tr '\0' '\n' <"/proc/$pid/environ" | grep -q '^LOCAL_RANK='; then kill -9 "$pid"; fi
done; }

cd "$folder/work"
say "starting Slurm in $folder"
start_slurm
say "$(sinfo --version): $(sinfo --noheader)"

service=$(launch_service)
job=$(launch 1x2)
wait_for "markers of job $job" has_said "$job" 'marker 1:3 committed'
wait_for "job $service folds" has_folded 1
say "job $job trains on 2 ranks, job $service folds; the materializer is killed at $(date +%T)"
kill -9 "$(pgrep -o -f "^[^ ]*python[^ ]* [^ ]*stream-ckpt materialize file://$folder/")"
wait_for "job $service is requeued and runs" runs_after "$service" 1
folded=$(find "$folder/store/manifests" -type f | wc -l)
wait_for "job $service folds again" has_folded "$folded"
runs_after "$job" 0 || die "job $job did not go on: $(scontrol show job "$job" | grep -o 'JobState=.*')"
say "job $service was requeued and folds again, $(date +%T); job $job went on meanwhile, newest marker: $(newest)"
say "the ranks of job $job are killed at $(date +%T)"
kill_ranks
wait_for "job $job is requeued and restores" has_said "$job" 'restored marker 1:'
say "job $job was requeued and goes on, $(date +%T): $(grep -h 'restored marker' "slurm-$job-trainer-0.err" | tail -1)"
wait_for "new markers of job $job" has_said "$job" 'marker 2:[0-9]* committed'
runs_after "$service" 1 || die "job $service did not go on: $(scontrol show job "$service" | grep -o 'JobState=.*')"
scancel "$job"
wait_for "job $job ends" bash -c "! squeue --noheader | grep -q ' $job '"
say "job $job canceled; newest marker and its ranks: $(newest)"

job=$(launch 1x3)
wait_for "job $job restores" has_said "$job" 'restored marker 2:'
wait_for "markers of job $job" has_said "$job" 'marker 3:[0-9]* committed'
say "job $job on 3 ranks: $(grep -h 'restored marker' "slurm-$job-trainer-0.err" | tail -1)"
scancel "$job"
wait_for "job $job ends" bash -c "! squeue --noheader | grep -q ' $job '"
runs_after "$service" 1 || die "job $service did not outlive the training"
scancel "$service"
wait_for "job $service ends" bash -c "! squeue --noheader | grep -q ' $service '"
[ "$(newest | cut -d' ' -f2)" = 3 ] || die "the newest marker is not of 3 ranks: $(newest)"
say "done; newest marker and its ranks: $(newest)"
