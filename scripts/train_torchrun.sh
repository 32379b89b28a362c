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
exec torchrun --nproc-per-node "$ranks" "$here/tools/train_ppo.py" --config "$config" "$@"
