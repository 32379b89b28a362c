#!/usr/bin/env bash
# Set up like quickstart.sh and run the tests: all but the slow ones, or all with --all. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup
marks="not slow"
if [ "${1:-}" = --all ]; then
    marks=""
    shift
fi
say "pytest${marks:+ -m \"$marks\"} $*"
exec python -m pytest ${marks:+-m "$marks"} "$@"
