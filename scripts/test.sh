#!/usr/bin/env bash
# Set up like quickstart.sh, then linters, types and the tests of a tier:
#
#   scripts/test.sh                  every day: what runs in one process, a file of ranks a room, one run
#   scripts/test.sh --ci             what CI runs: everything but the slow ones
#   scripts/test.sh --all            the slow ones too, and whole benchmarks
#   scripts/test.sh --changed [REF]  of CI's tests those that can reach what differs from commit REF (default: HEAD)
#   scripts/test.sh tests/gen -x     of CI's tests those in a folder or file; other arguments go to pytest
#
# Two processes run a file of tests each, the longest first; `-n 4` for more, `-n 0` for one (and --pdb).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup test
tier=everyday
case "${1:-}" in
    "") ;;
    --ci) tier=ci more="--expected-skips" && shift ;;
    --all) tier=all && shift ;;
    --changed)
        tier=ci && shift
        since=HEAD
        case "${1:-}" in "" | -*) ;; *) since=$1 && shift ;; esac
        files="$(PYTHONPATH=tests python -m testkit.imports "$since")"
        [ -n "$files" ] || { say "no test reaches what differs from $since" && exit; }
        # shellcheck disable=SC2086 # names of our files have no spaces
        set -- $files "$@"
        ;;
    *) tier=ci ;;
esac
export HF_HUB_OFFLINE=1 WANDB_MODE=offline # no ordinary test needs the network
say "lines of Python by room, and beside main (the budget is in CONTRIBUTING.md)"
PYTHONPATH=tests python -m testkit.line_budget
say "ruff and basedpyright (about half a minute)"
ruff check --quiet .
ruff format --quiet --check . || {
    echo "error: not formatted as ruff formats: run 'ruff format .'" >&2
    exit 1
}
basedpyright --level error
say "pytest --tier $tier $*"
exec python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --tier "$tier" ${more:-} "$@"
