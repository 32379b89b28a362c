"""The luggage for a GPU machine without network: wheels that an image with CUDA torch lacks, and CPU references.

`--prepare FOLDER` fills it where there is a network, `--wheels FOLDER` unpacks it where there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.base.launcher import module_command

EXACT = {"megatron-core"}  # another version than ours is as good as none
# What the program imports beside torch, numpy, numba, transformers, tokenizers, safetensors, pyarrow, matplotlib,
# tensorboard, rich, jinja2 and pyyaml, which images with CUDA torch have.
ALONE = ("megatron-core==0.16.1", "omegaconf==2.4.0", "scipy")
WITH_NEEDS = ("pydantic>=2.10",)
# flashinfer's kernels are compiled on the machine; of what it asks for the rest is for other GPUs.
KERNELS = ("flashinfer-python==0.6.4", "apache-tvm-ffi<0.2", "einops", "tabulate", "click", "nvidia-ml-py")
KERNELS_WITH_NEEDS = ("requests",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
INSTALLED = "installed"  # the folder within the luggage
REFERENCES = "references"
LARGEST_BYTES = 64 << 20


def download(folder: Path, python: str) -> None:
    """Fetch the wheels for Python `python` on Linux into `folder`. Raises InputError with pip's last line."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    command = module_command("pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(folder))
    command += ["--python-version", python, "--only-binary=:all:", "--implementation", "cp"]
    for platform in (*PLATFORMS, "manylinux2014_x86_64"):
        command += ["--platform", platform]
    for needs, names in (([], (*WITH_NEEDS, *KERNELS_WITH_NEEDS)), (["--no-deps"], (*ALONE, *KERNELS))):
        done = subprocess.run([*command, *needs, *names], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise InputError(f"--prepare {folder}: pip fetched no wheels for Python {python}: {last}")


def size_of(folder: Path) -> int:
    """Bytes to carry."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and INSTALLED not in file.parts)


def wheel_of(file: Path) -> tuple[str, str]:
    """("megatron-core", "0.16.1") of a wheel's file name."""
    name, version = file.name.split("-")[:2]
    return name.replace("_", "-").lower(), version


def lacking(wheels: list[Path], there: dict[str, str]) -> list[Path]:
    """Those that a machine with the packages `there` (name -> version) has not, or has older or, if EXACT, newer."""
    found = []
    for file in wheels:
        name, version = wheel_of(file)
        has = there.get(name)
        if has is None or (has != version if name in EXACT else _numbers(has) < _numbers(version)):
            found.append(file)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def packages_here() -> dict[str, str]:
    """Installed packages and their versions."""
    return {str(found.metadata["Name"]).replace("_", "-").lower(): found.version for found in metadata.distributions()}


def install(folder: Path) -> Path:
    """Unpack the wheels that this machine lacks into a folder of their own, without network; returns it."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise InputError(f"--wheels {folder}: no wheels there; fill it with scripts/gpu_check.sh --prepare {folder}")
    target = folder / INSTALLED
    if target.exists():
        shutil.rmtree(target)
    target.mkdir()
    if files := lacking(wheels, packages_here()):
        command = module_command("pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile")
        command += ["--disable-pip-version-check", "--target", str(target), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise InputError(f"--wheels {folder}: pip installed nothing: {done.stderr.strip().splitlines()[-1]}")
    return target


def put_first(target: Path) -> None:
    """Let this process and those that it starts import from `target` first."""
    sys.path.insert(0, str(target))
    paths = [str(target), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
