#!/usr/bin/env bash
# One node, one process per GPU (or per CPU rank): check first, then launch. The exit code of the check is passed on.
#
#   bash scripts/train_torchrun.sh RANKS CONFIG [key=value ...]
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/train_torchrun.sh RANKS CONFIG [key=value ...]" >&2
    exit 2
fi
ranks=$1 config=$2
shift 2
here="$(cd "$(dirname "$0")/.." && pwd)"
python "$here/tools/train_ppo.py" --config "$config" --dry-run --world-size "$ranks" "$@"
# read when CUDA and torch start; a value that is set already stays
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING-EAGER}" CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS-32}"
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER-0}"
if [ -z "${PYTORCH_ALLOC_CONF+set}${PYTORCH_CUDA_ALLOC_CONF+set}" ]; then
    export PYTORCH_ALLOC_CONF=expandable_segments:True
fi
# each rank on the cores beside its GPU, where torchrun can bind them
bind=
if command -v nvidia-smi >/dev/null; then
    if torchrun --standalone --nproc-per-node "$ranks" --numa-binding=node --no-python true >/dev/null 2>&1; then
        bind=--numa-binding=node
    else
        echo "ranks are not bound to the cores beside their GPUs: torchrun --numa-binding=node fails here" >&2
    fi
fi
exec torchrun --nproc-per-node "$ranks" ${bind:+"$bind"} "$here/tools/train_ppo.py" --config "$config" "$@"
