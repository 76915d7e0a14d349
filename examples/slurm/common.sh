# What the sbatch files of this folder share. They source it after `cd` to the repository's root.

# Slurm's name of this job. The last task of an array has the same SLURM_JOB_ID as the whole array, and scancel and
# scontrol would apply to all of its tasks.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# In a container: MEGAMOE_PYTHON is what starts Python in it, MEGAMOE_SRUN has further options of srun. With Apptainer:
#   MEGAMOE_PYTHON="apptainer exec --nv --bind $PWD IMAGE.sif python" sbatch ...
# With Pyxis:
#   export MEGAMOE_PYTHON=python
#   MEGAMOE_SRUN="--container-image=IMAGE --container-mounts=$PWD:$PWD --container-workdir=$PWD" sbatch ...
read -ra python <<< "${MEGAMOE_PYTHON:-.venv/bin/python}"
read -ra srun_options <<< "${MEGAMOE_SRUN:-}"
if [ -z "${MEGAMOE_PYTHON:-}" ] && [ ! -x .venv/bin/python ]; then
  echo "error: $PWD/.venv/bin/python does not exist on $(hostname): run make setup there, on a shared file system" >&2
  exit 2
fi

# Python on the first node alone, as this script needs it before and after training.
python_here() {
  if [ ${#srun_options[@]} = 0 ]; then
    "${python[@]}" "$@"
  else
    srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 "${srun_options[@]}" "${python[@]}" "$@" < "${stdin:-/dev/null}"
  fi
}

# The first node's address, where the ranks meet, as Slurm knows it: the names of some clusters' nodes do not resolve.
# The port is computed from the job's id, so that two jobs that share a node do not collide. 15000 to 29999 is below
# the range of ports that Linux assigns by itself.
meet() {
  local nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
  MASTER_ADDR=$(scontrol show node "${nodes%%$'\n'*}" | grep -o 'NodeAddr=[^ ]*' | head -1)
  export MASTER_ADDR=${MASTER_ADDR#NodeAddr=}
  export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
}

# One process for each GPU. A node without GPUs gets one process, or PROCESSES_PER_NODE processes.
# Without OMP_NUM_THREADS torchrun gives each process one thread, whatever the number of cores.
share_cores() {
  local threads
  processes=${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
  processes=$((processes > 0 ? processes : 1))
  threads=$((${SLURM_CPUS_PER_TASK:-1} / processes))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
}

# The variables that the description of the environment has, by name: others may be secrets, such as SLURM_JWT.
described='SLURM_(JOB_(ID|NAME|NODELIST|NUM_NODES|PARTITION|ACCOUNT|QOS)|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|'
described+='CPUS_ON_NODE|GPUS_ON_NODE|GPUS_PER_NODE|MEM_PER_(NODE|CPU|GPU)|RESTART_COUNT|ARRAY_(JOB|TASK)_ID|CLUSTER_NAME|'
described+='SUBMIT_(DIR|HOST))|NCCL_(DEBUG|DEBUG_SUBSYS|SOCKET_IFNAME|IB_(HCA|DISABLE|TIMEOUT|GID_INDEX)|P2P_(LEVEL|DISABLE)|'
described+='ALGO|PROTO|NVLS_ENABLE|CROSS_NIC|NET|NET_GDR_LEVEL|NET_PLUGIN|TOPO_FILE|(MIN|MAX)_NCHANNELS|BUFFSIZE)|'
described+='GLOO_SOCKET_IFNAME|CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|DEVICE_ORDER|HOME|LAUNCH_BLOCKING)|OMP_NUM_THREADS|'
described+='TORCH_(CUDA_ARCH_LIST|DISTRIBUTED_DEBUG|NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING|TRACE_BUFFER_SIZE))|'
described+='TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE|MASTER_(ADDR|PORT)|MEGAMOE_(HOME|PYTHON|SRUN|CHAIN|ENVIRONMENT)'

# The folder of this start's logs, and in it a description of the environment, which its owner alone can read. The run
# copies the description into its own folder, as environment/<job>.<restart>.txt.
open_logs() {
  logs=logs/$job.${SLURM_RESTART_COUNT:-0}
  mkdir -p "$logs"
  # Every line of a node's log begins with its rank. torchrun's own folders hold a separate log for each rank.
  export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
  export MEGAMOE_ENVIRONMENT=$PWD/$logs/environment.txt
  rm -f "$MEGAMOE_ENVIRONMENT"
  (umask 077 && : > "$MEGAMOE_ENVIRONMENT")
  {
    echo "job $job, start ${SLURM_RESTART_COUNT:-0}, nodes $SLURM_JOB_NODELIST, $(date -u +%FT%TZ)"
    echo "arguments: $*"
    echo "commit: $(git rev-parse HEAD 2>&1) $(git status --porcelain 2> /dev/null | wc -l) changed files"
    python_here --version
    python_here -c 'from importlib.metadata import distributions
for one in sorted({f"{it.name}=={it.version}" for it in distributions()}): print(one)'
    nvidia-smi 2> /dev/null || echo 'nvidia-smi: not found'
    ulimit -a
    env | grep -E "^($described)=" | sort
  } | stdin=/dev/stdin python_here -m megamoe.redaction > "$MEGAMOE_ENVIRONMENT"
}

# Check the nodes; with a bad one, the job ends before training. Skipped with PREFLIGHT=0.
preflight() {
  local code=0
  [ "${PREFLIGHT:-1}" != 0 ] || return 0
  srun --kill-on-bad-exit=0 --ntasks-per-node=1 --ntasks="$SLURM_NNODES" --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    --output="$logs/preflight-%n.out" "${srun_options[@]}" \
    "${python[@]}" tools/preflight.py --config "$config" "$@" || code=$?
  cat "$logs"/preflight-*.out
  [ "$code" = 0 ] || { go_on_without "$(sed -n 's/^exclude: //p' "$logs"/preflight-*.out)"; exit "$code"; }
}

# Put the job back into the queue with an exclusion of bad nodes (`n1,n2`), or exclude them from the next links of the
# chain. Not if the partition has too few other nodes: such a job would wait for ever. stop_without_progress limits how
# often this happens.
go_on_without() {
  local bad=$1 others jobs=$job one earlier
  [ -n "$bad" ] || return 0
  others=$(sinfo --noheader --Node --partition="$SLURM_JOB_PARTITION" --states=alloc,idle,mix,comp --format=%N |
    sort -u | grep -vcxF "${bad//,/$'\n'}") || true
  [ "$others" -ge "$SLURM_NNODES" ] || return 0
  if [ -n "${MEGAMOE_CHAIN:-}" ]; then
    jobs=$(squeue --noheader --states=PENDING --format='%i %k' | sed -n "s/ $MEGAMOE_CHAIN\$//p")
  else
    trap '' TERM # Slurm ends this script with the first command
    scontrol requeuehold "$job" || return 0
  fi
  for one in $jobs; do
    earlier=$(scontrol show job "$one" | sed -n 's/.* ExcNodeList=\([^( ]*\).*/\1/p')
    scontrol update JobId="$one" ExcNodeList="${earlier:+$earlier,}$bad" && echo "job $one: without $bad from now on"
  done
  [ -n "${MEGAMOE_CHAIN:-}" ] || scontrol release "$job"
}

# The newest checkpoint and the time of its saving: what shows whether a start has made progress.
newest_checkpoint() { python_here tools/status.py --config "$config" "$@" --checkpoint; }

# End the job, or the whole chain of jobs, if the start before this one ended by itself without a new checkpoint. The
# same would happen again: a damaged checkpoint, or a configuration that always crashes. A start that Slurm ended
# (preemption, a lost node) may be repeated, but the third without a new checkpoint is the last: the run may be the cause.
# Usage: stop_without_progress NAME ARGUMENTS; NAME is the same for all starts that go on with each other's work.
# logs/NAME.progress has a line for each start, the newest checkpoint before it, and `ended` if it ended by itself.
stop_without_progress() {
  local name=$1
  shift
  seen=logs/$name.progress
  at_start=$(newest_checkpoint "$@") || exit
  if [ -e "$seen" ]; then
    if [ "$at_start" = complete ]; then
      echo "$name: the run is complete"
      exit 0
    fi
    if [ "$(tail -n 1 "$seen")" = "$at_start ended" ] || [ "$(grep -cxF "$at_start" "$seen")" -ge 3 ]; then
      echo "error: the last start of $name saved no checkpoint (newest: $at_start); not started again: read its logs in" \
        "logs/, and remove $seen to start it nevertheless" >&2
      exit 1
    fi
  fi
  echo "$at_start" >> "$seen"
}

# Whether Slurm is about to give the nodes to a job of a higher priority. The ranks get SIGTERM from it.
preempted() { scontrol show job "$job" | grep -q ' PreemptTime=[0-9]'; }

# When Slurm warns (--signal), the ranks get the signal, save and stop. Before they run there is nothing to save.
# The shell handles a signal only between commands or in `wait`.
warned=
step=
warn() {
  warned=1
  [ -n "$step" ] || return 0
  echo "time limit near: saving"
  scancel --signal=USR1 "$job"
}
trap warn USR1

# Run a step with the ranks, in the background; wait for it, and leave its exit code in `code`.
run_step() {
  if [ -n "$warned" ]; then
    echo "error: the time limit is near before training has begun; not put back into the queue: make --time longer," \
      "or --signal later" >&2
    exit 1
  fi
  "$@" &
  step=$!
  [ -z "$warned" ] || warn # it came within the last two lines
  code=0
  wait "$step" || code=$?
  if [ -n "$warned" ]; then # a signal ends `wait`: srun is still running, or its exit code has not been read yet
    code=0
    wait "$step" || code=$?
  fi
  preempted || echo "$at_start ended" >> "$seen"
  [ "$code" = 0 ] || [ -n "$warned" ] || tell_errors
}

# The first errors of the ranks, so that this script's log tells why the job failed.
tell_errors() {
  echo "the ranks ended with exit code $code; their logs: $logs"
  grep -hE '^(\[rank [0-9]+\] )?error: ' "$logs"/node-*.out "$logs"/rank-*.out 2> /dev/null | head -n 5 || true
}

# Put the job back into the queue after a preemption, or after a warning if the run has saved since this start.
requeue_if_warned() {
  if preempted; then
    echo "preempted; back into the queue"
    scontrol requeue "$job"
    return
  fi
  [ -n "$warned" ] || return 0
  if [ "$(newest_checkpoint "$@")" = "$at_start" ]; then
    echo "error: this start saved no checkpoint before the time limit; not put back into the queue: make --time" \
      "longer, or --signal earlier" >&2
    exit 1
  fi
  echo "saved; back into the queue"
  scontrol requeue "$job"
}

# srun for the ranks. The arguments are further options of srun, and the command.
# --wait: when a node ends, with or without an error, the other nodes get five minutes. That is enough to finish
#   saving, and less than a collective's timeout. It is also longer than Slurm needs to notice that a node is gone:
#   then the job goes back into the queue, for which this script must still be running.
# --kill-on-bad-exit, the default of some sites, would not let the other nodes finish saving, so it is 0.
# --cpus-per-task is repeated: since Slurm 22.05 srun does not inherit it from sbatch, and would use one core.
# ulimit: a process has a socket to each other rank, and srun passes this shell's limit of open files on.
srun_ranks() {
  local timeout wait=300
  ulimit -Sn "$(ulimit -Hn)"
  timeout=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([0-9]*\).*/\1/p')
  timeout=$((${timeout:-300} * 3 / 2))
  srun --kill-on-bad-exit=0 --wait=$((timeout > wait ? timeout : wait)) \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${srun_options[@]}" "$@"
}

# torchrun on every node of the job, one process per GPU; the arguments are those of pretrain_gpt_moe.py.
# --rdzv-backend c10d: the nodes may start in any order; torchrun assigns the ranks.
# PET_RDZV_CONF is torchrun's --rdzv-conf. is_host: the first node hosts the rendezvous. By itself torchrun compares
#   names and addresses, which fails where Slurm's address of a node is not that of the node's own host name.
# --signals-to-handle: SIGUSR1 in addition to the usual ones. Otherwise SIGUSR1 would kill torchrun, and no process
#   would wait for the save.
# --shutdown-timeout: torchrun kills its processes this many seconds after a signal. That is enough to save, and
#   less than the time of --signal in the sbatch files.
torchrun_on_nodes() {
  export PET_RDZV_CONF=join_timeout=300,read_timeout=300
  srun_ranks --output="$logs/node-%n.out" \
    bash -c 'PET_RDZV_CONF+=,is_host=$((SLURM_NODEID == 0)); exec "$@"' bash \
    "${python[@]}" -m torch.distributed.run \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$processes" \
    --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=540 \
    --log-dir="$logs" --tee=3 \
    pretrain_gpt_moe.py "$@"
}
