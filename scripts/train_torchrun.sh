#!/usr/bin/env bash
# One node, one process per GPU (or per CPU rank), from a checkout: rlhfuse-train --ranks RANKS by another name.
#
#   bash scripts/train_torchrun.sh RANKS CONFIG [key=value ...]
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash scripts/train_torchrun.sh RANKS CONFIG [key=value ...]" >&2
    exit 2
fi
ranks=$1 config=$2
shift 2
exec python "$(dirname "$0")/../tools/train_ppo.py" --ranks "$ranks" --config "$config" "$@"
