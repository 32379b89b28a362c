#!/usr/bin/env bash
# Schedule search under mpirun on this machine.
#
#   bash scripts/search_schedule.sh RANKS --problem problem.json --out schedule.json --time-limit 60 --seed 1
set -euo pipefail
ranks=${1:?usage: bash scripts/search_schedule.sh RANKS --problem FILE --out FILE --time-limit SECONDS}
shift
here="$(cd "$(dirname "$0")/.." && pwd)"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
exec mpirun --oversubscribe -n "$ranks" python "$here/tools/search_schedule.py" "$@"
