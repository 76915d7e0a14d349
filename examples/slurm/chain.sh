#!/usr/bin/env bash
# Submit a chain of jobs, each of which goes on with the run where the one before stopped.
#
#   examples/slurm/chain.sh LINKS [sbatch options] -- CONFIG.yaml [section.key=value ...]
#   examples/slurm/chain.sh 10 --nodes=4 --time=24:00:00 -- examples/demo.yaml train.steps=100000
#
# For clusters that do not allow --requeue, or whose queues favour short jobs. Each link waits for the end of the one
# before, however it ended. A link ends at once, and ends the chain, if the link before has saved no checkpoint, or if
# the run is complete.

set -euo pipefail

links=${1:-}
if ! [[ $links =~ ^[1-9][0-9]*$ ]]; then
  echo 'error: usage: examples/slurm/chain.sh LINKS [sbatch options] -- CONFIG.yaml [section.key=value ...]' >&2
  exit 2
fi
shift
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  options+=("$1")
  shift
done
if [ $# -lt 2 ]; then
  echo 'error: no CONFIG given after --' >&2
  exit 2
fi
shift

here=$(dirname "${BASH_SOURCE[0]}")
export MEGAMOE_CHAIN
MEGAMOE_CHAIN=chain-$(date +%Y%m%d-%H%M%S)-$$
before=
for link in $(seq "$links"); do
  # The comment is how a link finds those after it.
  job=$(sbatch --parsable --no-requeue --comment="$MEGAMOE_CHAIN" ${before:+--dependency=afterany:$before} \
    "${options[@]}" "$here/pretrain.sbatch" "$@")
  before=${job%%;*}
  echo "$MEGAMOE_CHAIN: link $link of $links is job $before"
done
