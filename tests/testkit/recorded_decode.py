"""Engines whose decode steps are recorded and repeated on the CPU, as CUDA graphs are on a GPU."""

from collections.abc import Callable

import torch

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.engine import Engine
from rlhfuse.gen.gpu.decode_graphs import DecodeGraphs
from testkit.gen_models import engine_of, tiny_spec

CPU = torch.device("cpu")
WIDE = tiny_spec(context=1024, qk_norm=True, qkv_bias=True, proj_bias=True)


class Repeater:
    """Stands where the CUDA recorder stands: what it records runs again as Python, on the same tensors."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.released = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        work()  # the warm-up

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    def release(self) -> None:
        self.released += 1


def torch_engine(repeater: Repeater | None = None, spec: ModelSpec = WIDE, **more) -> Engine:
    """An engine over torch's kernels; with a repeater its decode steps are recorded and repeated."""
    engine = engine_of(spec, **({"kernels": "torch"} | more))
    if repeater is not None:
        engine.forward._graphs = DecodeGraphs(repeater, CPU)
    return engine
