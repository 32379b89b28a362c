"""What the checks import, loaded once before their processes are forked; none of it touches the GPU."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # whether there is a GPU is asked without starting CUDA
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import gpu_checks.generation  # noqa: E402, F401
import gpu_checks.migration  # noqa: E402, F401
import gpu_checks.training_speed  # noqa: E402, F401

import rlhfuse.run.launch  # noqa: E402, F401
