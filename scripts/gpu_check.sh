#!/usr/bin/env bash
# Every GPU check of the project in one call; the last line printed is one JSON object. Changes nothing outside of the
# folders that are named.
#
#   bash scripts/gpu_check.sh [--names A,B] [--budget SECONDS] [--out FILE] [--done FILE] [--hardware FILE]
#                                                                     uses $PYTHON, else .venv, else python3
#   bash scripts/gpu_check.sh --prepare FOLDER [--python X.Y]                    wheels and references for elsewhere
#   bash scripts/gpu_check.sh --wheels FOLDER ...                                there, without network
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then
        python=.venv/bin/python
    fi
fi
command -v "$python" >/dev/null || {
    echo "error: $python was not found; set PYTHON to a python that has torch" >&2
    exit 2
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # run from a checkout as well as installed
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" tools/gpu_check.py "$@"
