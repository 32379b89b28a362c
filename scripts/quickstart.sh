#!/usr/bin/env bash
# From a fresh clone to a trained tiny model: installs into .venv, checks the run, trains on four ranks.
#
#   bash scripts/quickstart.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup
config=examples/quickstart.yaml
say "checking the run (nothing is launched yet)"
python tools/train_ppo.py --config "$config" --dry-run --world-size 4 "$@" >/dev/null
say "torchrun --nproc-per-node 4 tools/train_ppo.py --config $config $*"
torchrun --nproc-per-node 4 tools/train_ppo.py --config "$config" "$@"
