#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine, for tests. Everything it writes is in one folder.
#
#   cluster.sh install         install Debian's slurm-wlm and munge if they are missing (needs root and a network)
#   cluster.sh start FOLDER    start munged, slurmctld and two slurmd; then: export SLURM_CONF=FOLDER/slurm.conf
#   cluster.sh stop FOLDER     end the jobs and the daemons
#   cluster.sh kill FOLDER n2  end one node's daemon and jobs at once, as a power failure would
#   cluster.sh revive FOLDER n2
#   cluster.sh disk FOLDER n2 PATH OPTIONS   make PATH read-only (ro) for that node, or an empty file system (size=1m)
#   cluster.sh disk FOLDER n2 PATH off       undo it (exit code 3 if this machine does not allow to mount)
#
# The daemons have keys, sockets, ports and process files of their own, so that they do not disturb a Slurm or a munge
# that the machine already has. Both nodes are at 127.0.0.1; their CPUs are made up (config_overrides).
# Exit codes: 0, or 3 if Slurm cannot be installed or needs root; the reason is on stderr.
set -euo pipefail

PROGRAMS=(slurmctld slurmd munged sbatch)
PATH=$PATH:/usr/sbin:/sbin
NODES=(n1 n2)

missing() {
  local program
  for program in "${PROGRAMS[@]}"; do
    command -v "$program" > /dev/null || { echo "$program"; return; }
  done
}

install_packages() {
  local absent log
  absent=$(missing)
  [ -n "$absent" ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "slurm: $absent is not installed, and only root can install it (apt-get install slurm-wlm munge)" >&2
    exit 3
  fi
  log=$(mktemp)
  # RUNLEVEL=1: the packages' own services do not start.
  if ! { timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 300 \
      apt-get install -y -qq --no-install-recommends slurm-wlm munge; } > "$log" 2>&1; then
    echo "slurm: $absent is not installed, and apt-get cannot install it: $(tail -1 "$log")" >&2
    rm -f "$log"
    exit 3
  fi
  rm -f "$log"
}

# Ports that nobody listens on now, below those that Linux gives to clients.
free_ports() {
  local count=$1 port=$((20000 + RANDOM % 9000))
  while [ "$count" -gt 0 ]; do
    port=$((port + 1))
    if ! (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      echo "$port"
      count=$((count - 1))
    fi
  done
}

write_conf() {
  local folder=$1 user ports
  user=$(id -un)
  mapfile -t ports < <(free_ports 3)
  cat > "$folder/slurm.conf" <<CONF
ClusterName=megamoe_test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start again after cred_expire seconds (default 120).
AuthInfo=socket=$folder/munge/socket,cred_expire=5
MpiDefault=none
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool_%n
SlurmctldPidFile=$folder/pids/slurmctld
SlurmdPidFile=$folder/pids/%n
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
KillWait=30
MinJobAge=3600
SlurmdTimeout=20
JobRequeue=1
FirstJobId=$((1000 + RANDOM % 13000))
GresTypes=gpu
TaskProlog=$folder/prolog
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=4 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=${ports[2]} CPUs=4 RealMemory=4000 State=UNKNOWN
# A job in \`urgent\` preempts those in \`batch\`, which get SIGTERM, 30 seconds, and go back into the queue.
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

start() {
  local folder=$1 absent node
  absent=$(missing)
  [ -z "$absent" ] || { echo "slurm: $absent is not installed; try $0 install" >&2; exit 3; }
  mkdir -p "$folder"/{state,spool_n1,spool_n2,pids,munge}
  chmod 755 "$folder" "$folder/munge"
  (umask 077; head -c 1024 /dev/urandom > "$folder/munge/key")
  # --force: munged would refuse folders above its own that others can write to, such as /tmp.
  munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" --seed-file="$folder/munge/seed" \
    --log-file="$folder/munge/log" --pid-file="$folder/pids/munged" 2> "$folder/munge/stderr"
  write_conf "$folder"
  # On a busy machine the jobs come first, so that the tests can measure times. Only root may do this.
  printf '#!/bin/sh\necho -10 2> /dev/null > "/proc/$PPID/autogroup" || true\n' > "$folder/prolog"
  chmod 755 "$folder/prolog"
  export SLURM_CONF=$folder/slurm.conf
  slurmctld -f "$SLURM_CONF"
  for node in "${NODES[@]}"; do start_node "$node"; done
  wait_for_nodes "$folder" "${#NODES[@]}"
}

# With mounts of its own where that is allowed, so that a disk of one node can fail.
start_node() {
  if unshare -m true 2> /dev/null; then
    unshare -m slurmd -N "$1" -f "$SLURM_CONF"
  else
    slurmd -N "$1" -f "$SLURM_CONF"
  fi
}

change_disk() {
  local folder=$1 node=$2 path=$3 options=$4 enter
  enter=(nsenter -t "$(cat "$folder/pids/$node")" -m)
  if [ "$options" = off ]; then
    "${enter[@]}" umount "$path"
  elif [ "$options" = ro ] && unshare -m true && "${enter[@]}" mount --bind "$path" "$path"; then
    "${enter[@]}" mount -o remount,bind,ro "$path"
  elif ! unshare -m true || ! "${enter[@]}" mount -t tmpfs -o "$options" none "$path"; then
    echo 'slurm: this machine does not allow to mount' >&2
    exit 3
  fi
}

wait_for_nodes() {
  local folder=$1 expected=$2 _
  for _ in $(seq 100); do
    [ "$(sinfo -h -p batch -t idle -o %D 2> /dev/null || true)" = "$expected" ] && return
    sleep 0.2
  done
  echo "slurm: the nodes did not come up; see $folder/*.log" >&2
  stop "$folder"
  [ "$(id -u)" = 0 ] || exit 3  # some builds of slurmd run as root alone
  exit 1
}

# The processes of a node's jobs: slurmstepd of that node and everything below it.
kill_tree() {
  local child
  for child in $(pgrep -P "$1" || true); do kill_tree "$child"; done
  kill -9 "$1" 2> /dev/null || true
}

steps_of() {
  local spool=$1 pid
  for pid in $(pgrep -x slurmstepd || true); do
    # slurmstepd gets its node's name and configuration from slurmd; its log descriptor tells which node's it is.
    if ls -l "/proc/$pid/fd" 2> /dev/null | grep -q -F "$spool"; then echo "$pid"; fi
  done
}

kill_node() {
  local folder=$1 node=$2 pid
  pid=$(cat "$folder/pids/$node" 2> /dev/null || true)
  # A killed daemon leaves its file, and its number may by then be another process'.
  [ "$(cat "/proc/${pid:-0}/comm" 2> /dev/null)" != slurmd ] || kill -9 "$pid" || true
  rm -f "$folder/pids/$node"
  for pid in $(steps_of "$folder/$node.log"); do kill_tree "$pid"; done
}

stop() {
  local folder=$1 file node pid
  export SLURM_CONF=$folder/slurm.conf
  for node in "${NODES[@]}"; do
    [ ! -s "$folder/pids/$node" ] || kill_node "$folder" "$node"
  done
  for file in "$folder"/pids/*; do
    pid=$(cat "$file" 2> /dev/null || true)
    case $(cat "/proc/${pid:-0}/comm" 2> /dev/null || true) in
      slurmctld | munged) kill "$pid" 2> /dev/null || true ;;
    esac
  done
}

usage() {
  sed -n '2,11p' "$0" | sed 's/^# \{0,1\}//'
  exit 2
}

case ${1:-} in
  install) install_packages ;;
  start) [ $# = 2 ] || usage; start "$2" ;;
  stop) [ $# = 2 ] || usage; stop "$2" ;;
  kill) [ $# = 3 ] || usage; kill_node "$2" "$3" ;;
  revive) [ $# = 3 ] || usage; export SLURM_CONF=$2/slurm.conf; start_node "$3" ;;
  disk) [ $# = 5 ] || usage; change_disk "$2" "$3" "$4" "$5" ;;
  *) usage ;;
esac
