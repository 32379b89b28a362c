#!/usr/bin/env bash
# Schedule search under mpirun on this machine.
#
#   bash scripts/search_schedule.sh RANKS --problem problem.json --out schedule.json --time-limit 60 --seed 1
#
# mpirun kills its ranks a quarter of a second after Ctrl-C or SIGTERM, but passes SIGUSR1 on and waits: so that
# is what it is sent here, and the search ends with its best schedule written.
set -euo pipefail
ranks=${1:?usage: bash scripts/search_schedule.sh RANKS --problem FILE --out FILE --time-limit SECONDS}
shift
here="$(cd "$(dirname "$0")/.." && pwd)"
if [ "$(id -u)" = 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
stopped=0 given=0
set -m # mpirun in a process group of its own, out of the reach of the terminal's Ctrl-C
mpirun --oversubscribe -n "$ranks" python "$here/tools/search_schedule.py" "$@" </dev/null &
search=$!
hand_on() {
    given=$((given + 1))
    kill -USR1 "$search" 2>/dev/null || true
}
trap 'stopped=130; hand_on' INT
trap 'stopped=143; hand_on' TERM
trap hand_on USR1
heard=none
while [ "$heard" != "$given" ]; do # a signal ends the wait, not the search
    heard=$given code=0
    wait "$search" || code=$?
done
if [ "$stopped" != 0 ] && [ "$code" = 138 ]; then code=$stopped; fi
exit "$code"
