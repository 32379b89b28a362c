"""A stage of one checkout on the null device: python benchmarks/layer_host_side.py CHECKOUT LAYERS [--counts].

With --counts it prints what a stage calls, launches and makes nodes of, forward and backward. Else for each line of
its input it prints the CPU microseconds of forward, backward and a forward without a graph, a layer each.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from null_device.device import install

LENGTHS, TIMES, WARM = [512] * 4, 30, 10
checkout, layers = Path(sys.argv[1]), int(sys.argv[2])
sys.path[:0] = [str(checkout), str(checkout / "tools")]
library: Any = install()
warnings.filterwarnings("ignore")

import gpu_checks.stage_bench as stage_bench  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_checks.bench import Bench  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rlhfuse.parallel.device import Device  # noqa: E402
from rlhfuse.parallel.optimizer import ModelOptimizer  # noqa: E402


class NullBench(Bench):
    device = Device(torch.device("cuda", 0), "gloo")  # pyright: ignore[reportAssignmentType]


class Operators(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Side:
    """Forward and backward of 2,048 tokens."""

    def __init__(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore
        stage_bench.randomise = ModelOptimizer.release_gradients = lambda self: (
            None
        )  # there are no numbers, and no memory
        made = stage_bench.MiddleStage("8b", layers, NullBench("cuda", Path(tempfile.gettempdir()), None))  # pyright: ignore
        self.stage, self.batch = made.stage, made.batch(LENGTHS)
        self.shape: Any = self.stage.hidden_shape(len(self.batch))

    def forward(self) -> Any:
        hidden = torch.empty(self.shape, dtype=torch.bfloat16, device="cuda").requires_grad_(True)
        return self.stage.forward(self.batch, hidden)

    def backward(self, out: Any) -> None:
        torch.autograd.backward(out, torch.empty_like(out))

    def times(self) -> dict[str, list[int]]:
        """Nanoseconds of all threads."""
        clock, found = time.process_time_ns, {"forward": [], "backward": [], "scoring": []}
        for round in range(WARM + TIMES):
            marks = [clock()]
            out = self.forward()
            marks.append(clock())
            self.backward(out)
            marks.append(clock())
            del out
            with torch.no_grad():
                marks[3:] = clock(), self.forward() is not None and clock()
            if round >= WARM:
                pairs = (0, 1), (1, 2), (3, 4)
                for (begin, end), taken in zip(pairs, found.values()):
                    taken.append(marks[end] - marks[begin])
        return found

    def counts(self) -> dict[str, int]:
        """Exact: no clock, and one thread."""
        with torch.autograd.set_multithreading_enabled(False):
            self.backward(self.forward())
            found: dict[str, int] = {}
            kept: list[Any] = []
            for name, work in (
                ("forward", lambda: kept.append(self.forward())),
                ("backward", lambda: self.backward(kept.pop())),
            ):
                calls, before = Counter(), library.null_launches()
                sys.setprofile(lambda frame, event, argument, calls=calls: calls.update([event]))
                work()
                sys.setprofile(None)
                found |= {f"{name} Python calls": calls["call"], f"{name} C calls": calls["c_call"]}
                found[f"{name} launches"] = library.null_launches() - before
            with Operators() as forward:
                out = self.forward()
            with Operators() as backward:
                self.backward(out)
        return found | {"forward operators": forward.count, "backward operators": backward.count}


def main() -> None:
    side = Side()
    if "--counts" in sys.argv:
        print(json.dumps(side.counts()), flush=True)
    else:
        print("ready", flush=True)
        for _ in sys.stdin:
            taken = side.times().items()
            print(json.dumps({name: sorted(ns)[len(ns) // 10] / 1e3 / layers for name, ns in taken}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
