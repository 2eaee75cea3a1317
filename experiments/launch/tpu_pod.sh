#!/bin/sh
# One training on all hosts of a TPU pod slice, which find each other:
#
#     experiments/launch/tpu_pod.sh NAME ZONE /mnt/shared/RUN gpt2-small --optimizer.name hetero
#
# The slice is a running one (`gcloud compute tpus tpu-vm create`) whose hosts have this checkout in
# ~/weight-geometry, with `.venv` made by `make .venv/.experiments` and `.venv/bin/pip install "jax[tpu]"`. The
# folder of the run is one that all hosts have mounted. A slice that was taken away and came back goes on with
# the same command.
set -eu
[ $# -ge 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
name=$1 zone=$2 run=$3
shift 3
exec gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker=all --command \
    "cd ~/weight-geometry && .venv/bin/python -m experiments train --dir '$run' --devices.how mesh --hosts.automatic $*"
