"""Compile Triton kernels for a GPU that is not there, with the arguments that the code under test gives them.

The interpreter in which other tests run kernels accepts much that the compiler refuses. `compiled_launches` runs a
function in a process without the interpreter, where every launch compiles (ptxas included) and nothing runs;
`compiled_variants` compiles nothing and says for what each launch would be compiled.

The compiler is the Triton that is installed. The others of the supported torch versions are tried by
`pytest tests/models/gpu/test_compilers.py` (slow: `scripts/test.sh --all` runs it), which takes them from the index.
By hand: `pip install --no-deps --target FOLDER triton==3.7.0`, then `PYTHONPATH=FOLDER pytest -k compile tests/...`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}  # bytes that one block of threads can have


@dataclass(frozen=True)
class Launch:
    kernel: str
    arch: int  # 80: A100, 90: H100 and H200
    grid: tuple[int, ...]
    warps: int
    registers: int  # of a thread
    stack: int  # bytes of a thread in device memory, where spilled registers go
    shared: int  # bytes of a block of threads
    ptx: str = field(repr=False, compare=False)


def compiled_launches(file: str, function: str, arch: int = 90) -> list[Launch]:
    """What `function()` of a test file launches, in order, each compiled. It works on CPU tensors, full of anything.

    `file`: the caller's __file__. Fails with the compiler's words, or where a kernel wants more than a GPU has.
    """
    launches = [Launch(**line | {"grid": tuple(line["grid"])}) for line in _run_apart(file, function, str(arch))]
    greedy = [launch for launch in launches if launch.shared > SHARED_MEMORY[arch]]
    assert not greedy, f"more than {SHARED_MEMORY[arch]} bytes of shared memory: {greedy}"
    return launches


def compiled_variants(file: str, function: str) -> list[tuple[str, str, str]]:
    """What each launch of `function()` of a test file is compiled for, in order: kernel, constants and options, and
    what Triton specializes on beside these (types, alignment of addresses, divisibility of integers)."""
    return [tuple(line) for line in _run_apart(file, function, "")]


def _run_apart(file: str, function: str, arch: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, file, function, arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
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


def _compile(file: str, function: str, arch: int) -> list[Launch]:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Absent:
        """As much of a driver as compiling asks for."""

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", arch, 32)

    driver.set_active(Absent())
    launches: list[Launch] = []
    run = JITFunction.run
    usages: dict[str, tuple[int, int]] = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        if compiled.hash not in usages:
            usages[compiled.hash] = _usage(compiled.asm["cubin"])
        metadata = compiled.metadata
        size = grid(dict(zip(kernel.arg_names, args), **options)) if callable(grid) else tuple(grid)
        usage = usages[compiled.hash]
        launches.append(
            Launch(metadata.name, arch, size, metadata.num_warps, *usage, metadata.shared, compiled.asm["ptx"])
        )
        return compiled

    JITFunction.run = record
    _call(file, function)
    return launches


def _specialize(file: str, function: str) -> list[tuple[str, str, str]]:
    from triton.runtime.jit import JITFunction

    from rlhfuse.rehearsal.launches import compiled_for

    variants = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        variants.append((kernel.__name__, *compiled_for(kernel, args, options)))

    JITFunction.run = record
    _call(file, function)
    return variants


def _call(file: str, function: str) -> None:
    sys.path[:0] = [str(TESTS), str(Path(file).parent), *map(str, Path(file).parents[:2])]
    spec = importlib.util.spec_from_file_location("compiled_test", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["compiled_test"] = module
    spec.loader.exec_module(module)
    getattr(module, function)()


if __name__ == "__main__":
    file, function, arch = sys.argv[1:]
    if arch:
        print(json.dumps([asdict(launch) for launch in _compile(file, function, int(arch))]))
    else:
        print(json.dumps(_specialize(file, function)))
