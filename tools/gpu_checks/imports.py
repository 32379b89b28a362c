"""What the checks import, loaded once before their processes are forked; none of it touches the GPU."""

from __future__ import annotations

import os
import subprocess
import warnings

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is asked without starting CUDA
SMI = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
try:  # Megatron imports flashinfer, which starts CUDA to ask this unless it is told
    capability = subprocess.run(SMI, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{capability}a")
except (OSError, subprocess.SubprocessError, IndexError):
    pass  # no driver: there is nothing to start
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import gpu_checks.generation  # noqa: E402, F401
import gpu_checks.migration  # noqa: E402, F401
import gpu_checks.training_speed  # noqa: E402, F401

import rlhfuse.run.launch  # noqa: E402, F401
