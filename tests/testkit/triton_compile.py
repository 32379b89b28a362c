"""Compile Triton kernels for GPUs that are not there, with the arguments that the code under test gives them.

The interpreter in which other tests run kernels accepts much that the compiler refuses. `compiled_launches` runs
`launch_all()` of a test file in a process without the interpreter, where every launch compiles (ptxas included) and
nothing runs; `compiled_variants` compiles nothing and says for what each launch would be compiled.

The compiler is the Triton that is installed. The others of the supported torch versions are tried by
`pytest tests/models/test_compilers.py` (slow: `scripts/test.sh --all` runs it), which takes them from the index.
By hand: `pip install --no-deps --target FOLDER triton==3.7.0`, then `PYTHONPATH=FOLDER pytest -k compile tests/...`.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from typing import Any

from testkit.programs import PATHS, Programs

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes that one block of threads can have; of A100, of H100 and H200


@dataclass(frozen=True)
class Launch:
    kernel: str
    arch: int  # of SHARED_MEMORY
    warps: int
    registers: int  # of a thread
    stack: int  # bytes of a thread in device memory, where spilled registers go
    shared: int  # bytes of a block of threads
    ptx: str = field(repr=False, compare=False)


def compiled_launches(programs: Programs, file: str, arch: int) -> list[Launch]:
    """What `launch_all()` of a test file launches, in order, each compiled. It works on CPU tensors, full of anything.

    `file`: the caller's __file__. Fails with the compiler's words, or where a kernel wants more than a GPU has.
    """
    launches = [launch for launch in (Launch(**line) for line in _run_apart(programs, file)) if launch.arch == arch]
    greedy = [launch for launch in launches if launch.shared > SHARED_MEMORY[arch]]
    assert not greedy, f"more than {SHARED_MEMORY[arch]} bytes of shared memory: {greedy}"
    return launches


def compiled_variants(programs: Programs, file: str) -> list[tuple[str, str, str]]:
    """What each launch of `launch_all()` of a test file is compiled for, in order: kernel, constants and options, and
    what Triton specializes on beside these (types, alignment of addresses, divisibility of integers)."""
    return [tuple(line) for line in _run_apart(programs, file, "variants")]


@functools.cache  # one process compiles a file for all GPUs
def _run_apart(programs: Programs, file: str, *mode: str) -> Any:
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PATHS)))
    done = programs.python("-m", __name__, file, *mode, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of the one kernel in a binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


class Absent:
    """As much of a driver as compiling asks for; a device for each GPU, since what is compiled is kept by device."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def _compile(file: str) -> list[Launch]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    run, usages = JITFunction.run, {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in usages:
            usages[compiled.hash] = _usage(compiled.asm["cubin"])
        facts, usage = compiled.metadata, usages[compiled.hash]
        arch = driver.active.get_current_device()
        launches.append(Launch(facts.name, arch, facts.num_warps, *usage, facts.shared, compiled.asm["ptx"]))

    JITFunction.run = record
    launch_all = _read(file)
    for arch in SHARED_MEMORY:
        driver.set_active(Absent(arch))
        launch_all()
    return launches


def _specialize(file: str) -> list[tuple[str, str, str]]:
    from rehearsal.launches import compiled_for
    from triton.runtime.jit import JITFunction

    variants = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        variants.append((kernel.__name__, *compiled_for(kernel, args, options)))

    JITFunction.run = record
    _read(file)()
    return variants


def _read(file: str) -> Any:
    spec = importlib.util.spec_from_file_location("compiled_test", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["compiled_test"] = module
    spec.loader.exec_module(module)
    return module.launch_all


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    file, *mode = sys.argv[1:]
    print(json.dumps(_specialize(file) if mode else [asdict(launch) for launch in _compile(file)]))
