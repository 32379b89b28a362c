#!/usr/bin/env bash
# Every GPU check of the project in one call; the last line printed is one JSON object. Installs nothing.
#
#   bash scripts/gpu_check.sh [--only TEXT]          uses $PYTHON, else .venv/bin/python, else python3
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
    echo "error: $python was not found; set PYTHON to a python that has torch and megatron-core" >&2
    exit 2
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # run from a checkout as well as installed
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec "$python" tools/gpu_check.py "$@"
