#!/usr/bin/env bash
# From a fresh clone to a trained tiny model: installs into .venv, checks the run, trains on four ranks.
#
#   bash scripts/quickstart.sh [key=value ...]          see scripts/setup.sh for PYTHON, RLHFUSE_VENV, TORCH_INDEX
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup
installed=$SECONDS
config=examples/quickstart.yaml
if [ $# -gt 0 ]; then
    say "checking the run (nothing is launched yet)"
    python tools/train_ppo.py --config "$config" --dry-run --world-size 4 "$@" >/dev/null
fi
checked=$SECONDS
say "torchrun --nproc-per-node 4 tools/train_ppo.py --config $config $*"
torchrun --nproc-per-node 4 tools/train_ppo.py --config "$config" "$@"
say "seconds: installing $installed, checking $((checked - installed)), start and training $((SECONDS - checked))"
