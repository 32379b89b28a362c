"""The first check: what the machine has, and what of it can be imported."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Any

import torch
from gpu_checks.bench import Bench
from gpu_checks.result import require

PACKAGES = (
    "torch triton numpy numba scipy megatron-core omegaconf pydantic transformers tokenizers safetensors "
    "pyarrow rich tensorboard matplotlib jinja2 flash-attn flashinfer-python apache-tvm-ffi"
).split()
MODULES = ("megatron.core", "rlhfuse.run.launch", "triton", "flashinfer", "flash_attn")
NEEDED = MODULES[:2]


def environment(bench: Bench) -> dict[str, Any]:
    """What the figures were measured on."""
    facts: dict[str, Any] = {"python": sys.version.split()[0], "cuda_of_torch": torch.version.cuda}
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["tools"] = [name for name in ("nvcc", "ninja", "g++", "mpirun") if shutil.which(name)]
    facts["processors"], facts["shared_memory_mib"] = os.cpu_count(), shutil.disk_usage("/dev/shm").total >> 20
    facts["device"] = bench.kind
    if torch.cuda.is_available():
        from torch.cuda import nccl

        properties = torch.cuda.get_device_properties(0)
        facts["nccl"] = ".".join(map(str, nccl.version()))
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
        facts |= {"multiprocessors": properties.multi_processor_count, "capability": properties.major}
        facts["devices"] = torch.cuda.device_count()
        facts["driver"] = _driver()
    return facts


def _driver() -> str:
    """Driver version, compute mode and MIG mode; only read."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"


def check_machine(bench: Bench) -> dict:
    """Versions, the GPU, compilers, and what can be imported; all that the program needs can be."""
    found: dict[str, str] = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
            found[name] = "imported"
        except Exception as error:  # an import may fail in any way
            found[name] = f"{type(error).__name__}: {error}"[:300]
    facts = {"cuda": torch.cuda.is_available(), "environment": environment(bench), "imports": found}
    return require(all(found[name] == "imported" for name in NEEDED), facts)
