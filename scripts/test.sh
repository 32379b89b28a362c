#!/usr/bin/env bash
# Set up like quickstart.sh, run linter and type checker, then the tests: all but the slow ones, or all with --all.
# Other arguments go to pytest.
#
# Two processes run a file of tests each, in the order of the folders; `-n 4` for more, `-n 0` for one (and --pdb).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup test
marks="not slow"
if [ "${1:-}" = --all ]; then
    marks=""
    shift
fi
export HF_HUB_OFFLINE=1 WANDB_MODE=offline # no ordinary test needs the network
say "ruff, basedpyright"
ruff check --quiet .
ruff format --quiet --check . || {
    echo "error: not formatted as ruff formats: run 'ruff format .'" >&2
    exit 1
}
basedpyright --level error
say "pytest${marks:+ -m \"$marks\"} $*"
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${marks:+-m "$marks"} "$@"
