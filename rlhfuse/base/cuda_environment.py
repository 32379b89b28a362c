"""What CUDA, NCCL and torch's allocator read from the environment at their start: set before anything imports torch.

And what this machine has: an NVIDIA driver, found without torch; packages that a run can do without, of which it is
known whether one can be used once it is imported, not once it is found.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

NVIDIA_DRIVER = Path("/proc/driver/nvidia")  # there while the driver is loaded, whatever version it has
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_DEVICES = ("", "-1", "NoDevFiles")  # values of it by which people and SLURM hide every GPU
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the name of now and the one before
REGISTER = "NCCL_GRAPH_REGISTER"

# A transfer that waits for another rank occupies its stream. Streams that share a hardware queue could then wait for
# each other; a kernel loaded at its first launch waits for the whole device; so does the allocator when it gives
# memory back because no free piece is large enough, which pieces that grow in place make rare. In such pieces NCCL must
# not register the buffers of calls that a CUDA graph holds, as it does unless told: a replay would read elsewhere.
WANTED = {QUEUES: "32", LOADING: "EAGER", ALLOCATOR[0]: "expandable_segments:True", REGISTER: "0"}


def missing(environ: MutableMapping[str, str]) -> list[str]:
    """Names that are wanted and not set; a value that a user has set is the user's."""
    chosen = any(name in environ for name in ALLOCATOR)
    return [name for name in WANTED if name not in environ and not (chosen and name in ALLOCATOR)]


def set_cuda_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Set what is missing; returns the names. Without effect on a process that has started CUDA already."""
    names = missing(environ)
    environ.update({name: WANTED[name] for name in names})
    return names


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Whether there is an NVIDIA GPU here, usable or not, that `environ` does not hide."""
    return NVIDIA_DRIVER.exists() and environ.get(VISIBLE) not in NO_DEVICES


def recording_obstacle(environ: Mapping[str, str]) -> str:
    """Why a CUDA graph cannot hold NCCL's calls: replays would access memory that is not theirs; '' if it can."""
    grows = any("expandable_segments:True" in environ.get(name, "").replace(" ", "") for name in ALLOCATOR)
    if not grows or environ.get(REGISTER) == WANTED[REGISTER]:
        return ""
    given = environ.get(REGISTER)
    said = f"{REGISTER} is not set" if given is None else f"{REGISTER}={given}"
    return f"{said}, and NCCL registers buffers in expandable segments when a graph records it; export {REGISTER}=0"


def import_obstacle(module: str, title: str) -> str:
    """Import `module` of an optional package, called `title`; why that is not possible, in one line, '' if it is."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return f"{title} is not installed"
        return f"{title} cannot be imported: {error}"
    except Exception as error:  # whatever a broken installation raises: one for another torch lacks symbols
        return f"{title} cannot be imported: {' '.join(str(error).split()) or type(error).__name__}"
    return ""
