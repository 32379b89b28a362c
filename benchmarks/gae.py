"""GAE as one blocked matrix product against the recursive loop, at 64 x 2048 and 512 x 8192 tokens.

    python benchmarks/gae.py [--runs 3]

Two loops: `loop` walks a padded [samples, tokens] array from the last token to the first, all samples at once, as most
trainers do; `scalar` is the recursion of one sample in plain Python, timed on a few samples and scaled up. Lengths are
uniform between half and all of the size. One JSON object: seconds are the fastest of the runs, memory is the most that
torch held beside the inputs, `error` the largest difference from the loop.
"""

from __future__ import annotations

import argparse
import json
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfuse.errors import run_program
from rlhfuse.ppo.advantage import BLOCK, generalized_advantages
from rlhfuse.ppo.rollout import segment_index

SIZES = ((64, 2048), (512, 8192))
SCALAR_SAMPLES = 4
GAMMA, LAM = 0.99, 0.95


class LiveBytes(TorchDispatchMode):
    """Most bytes of storages that operations made and that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
            self.peak = max(self.peak, sum(self._alive.values()))


def padded_loop(rewards: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The recursion over time for all samples at once, on padded arrays; flat [R] in and out."""
    width = int(lengths.max())
    place = segment_index(torch.arange(len(lengths)) * width, lengths)
    padded = torch.zeros(3, len(lengths) * width, dtype=torch.float64)
    padded[0, place], padded[1, place], padded[2, place] = rewards, values, 1.0
    reward, value, mask = padded.view(3, len(lengths), width)
    out = torch.zeros_like(reward)
    following, carried = torch.zeros(len(lengths), dtype=torch.float64), torch.zeros(len(lengths), dtype=torch.float64)
    for t in reversed(range(width)):
        here = mask[:, t]
        carried = here * (reward[:, t] + GAMMA * following - value[:, t] + GAMMA * LAM * carried)
        following = here * value[:, t]
        out[:, t] = carried
    return out.flatten()[place]


def scalar_loop(rewards: list[float], values: list[float]) -> list[float]:
    """One sample in plain Python."""
    out, carried, following = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        carried = rewards[t] + GAMMA * following - values[t] + GAMMA * LAM * carried
        out[t], following = carried, values[t]
    return out


def fastest(function: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def compare(samples: int, tokens: int, runs: int) -> dict[str, float]:
    """One row of the result."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens + 1, (samples,), generator=generator)
    lengths[0] = tokens
    rewards, values = torch.randn(2, int(lengths.sum()), generator=generator, dtype=torch.float64)

    def product() -> Tensor:
        return generalized_advantages(rewards, values, lengths, GAMMA, LAM)

    def loop() -> Tensor:
        return padded_loop(rewards, values, lengths)

    some = lengths[:SCALAR_SAMPLES].tolist()
    pieces = list(zip(rewards[: sum(some)].split(some), values[: sum(some)].split(some)))
    scalar = fastest(lambda: [scalar_loop(r.tolist(), v.tolist()) for r, v in pieces], 1) * len(rewards) / sum(some)
    row = {"samples": samples, "tokens": tokens, "response_tokens": len(rewards)}
    row["error"] = float((product() - loop()).abs().max())
    row |= {"product_seconds": fastest(product, runs), "loop_seconds": fastest(loop, runs), "scalar_seconds": scalar}
    for name, function in (("product", product), ("loop", loop)):
        with LiveBytes() as live:
            function()
        row[f"{name}_peak_mb"] = live.peak / 1e6
    row["loop_over_product"] = row["loop_seconds"] / row["product_seconds"]
    row["scalar_over_product"] = row["scalar_seconds"] / row["product_seconds"]
    row["whole_matrix_mb"] = tokens * tokens * 8 / 1e6  # what a product without blocks would add
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="GAE as a blocked matrix product against the recursive loop.")
    parser.add_argument("--runs", type=int, default=3, help="the fastest of so many counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(samples, tokens, arguments.runs) for samples, tokens in SIZES]
    print(json.dumps({"benchmark": "gae", "threads": 1, "block_tokens": BLOCK, "sizes": rows}, indent=1))


if __name__ == "__main__":
    run_program(main)
