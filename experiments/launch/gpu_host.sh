#!/bin/sh
# One host's part of a training on several GPU hosts, with all GPUs of each; started on every host:
#
#     experiments/launch/gpu_host.sh FIRST_HOST:PORT COUNT INDEX RUN gpt2-small --optimizer.name hetero
#
# COUNT is the number of hosts and INDEX this one's, from 0, which FIRST_HOST has. RUN is a folder that all of
# them see. Under Slurm: srun --ntasks-per-node=1 sh -c 'experiments/launch/gpu_host.sh "$(scontrol show
# hostnames "$SLURM_JOB_NODELIST" | head -1):8476" "$SLURM_NNODES" "$SLURM_NODEID" RUN gpt2-small'
set -eu
[ $# -ge 5 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2; }
coordinator=$1 count=$2 index=$3 run=$4
shift 4
cd "$(dirname "$0")/../.."
exec .venv/bin/python -m experiments train --dir "$run" --devices.how mesh \
    --hosts.coordinator "$coordinator" --hosts.count "$count" --hosts.index "$index" "$@"
