"""GAE as one blocked matrix product against the recursive loop, at 64 x 2048 and 512 x 8192 tokens.

    python benchmarks/gae.py

The loop walks a padded [samples, tokens] array from the last token to the first, all samples at once. Lengths are
uniform between half and all of the size; memory is the most that torch held beside the inputs.
"""

from __future__ import annotations

import weakref

import torch
from harness import Figure, Measurement, options, take_turns, timed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfuse.base.errors import run_program
from rlhfuse.ppo.advantage import BLOCK, generalized_advantages
from rlhfuse.ppo.rollout import segment_index

SIZES, QUICK = ((64, 2048), (512, 8192)), ((3, 40),)
GAMMA, LAM = 0.99, 0.95


class LiveBytes(TorchDispatchMode):
    """Most bytes of storages that operations made and that were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in args if isinstance(tensor, Tensor)}
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
    index = segment_index(torch.arange(len(lengths)) * width, lengths)
    padded = torch.zeros(3, len(lengths) * width, dtype=torch.float64)
    padded[0, index], padded[1, index], padded[2, index] = rewards, values, 1.0
    reward, value, mask = padded.view(3, len(lengths), width)
    out = torch.zeros_like(reward)
    following, carried = torch.zeros(2, len(lengths), dtype=torch.float64)
    for t in reversed(range(width)):
        here = mask[:, t]
        carried = here * (reward[:, t] + GAMMA * following - value[:, t] + GAMMA * LAM * carried)
        following = here * value[:, t]
        out[:, t] = carried
    return out.flatten()[index]


def main() -> None:
    arguments = options(__doc__, rounds=3).parse_args()
    measurement = Measurement("gae", arguments)
    torch.set_num_threads(1)
    sizes = QUICK if arguments.quick else SIZES
    rows = [compare(measurement, samples, tokens, arguments) for samples, tokens in sizes]
    columns = ("size", "product", "loop", "loop / product", "product MB", "loop MB", "whole matrix MB")
    measurement.table("sizes", "GAE: a blocked matrix product against loops", columns, rows)
    measurement.facts(threads=1, block_tokens=BLOCK)
    measurement.finish()


def compare(measurement: Measurement, samples: int, tokens: int, arguments) -> list[str]:
    """Figures of one size, and its row of the table."""
    generator = torch.Generator().manual_seed(arguments.seed)
    lengths = torch.randint(tokens // 2, tokens + 1, (samples,), generator=generator)
    lengths[0] = tokens
    rewards, values = torch.randn(2, int(lengths.sum()), generator=generator, dtype=torch.float64)
    ways = {
        "product": lambda: generalized_advantages(rewards, values, lengths, GAMMA, LAM),
        "loop": lambda: padded_loop(rewards, values, lengths),
    }
    taken = take_turns({name: timed(way) for name, way in ways.items()}, arguments.rounds, warm_up=True)
    name, peaks = f"{samples}x{tokens}", []
    for way, function in ways.items():
        measurement.figure(f"{name}.{way}_seconds", Figure.of(taken[way], "s"))
        with LiveBytes() as live:
            function()
        peaks.append(measurement.figure(f"{name}.{way}_peak", live.peak / 1e6, "MB").value)
    ratio = measurement.figure(f"{name}.loop_over_product", Figure.ratio(taken["loop"], taken["product"]))
    measurement.figure(f"{name}.error", float((ways["product"]() - ways["loop"]()).abs().max()))
    seconds = [f"{Figure.of(taken[way]).value:.4g} s" for way in ways]
    whole = tokens * tokens * 8 / 1e6  # what a product without blocks would add
    megabytes = [f"{value:.1f}" for value in (*peaks, whole)]
    return [f"{samples} x {tokens}", *seconds, ratio.text(".1f"), *megabytes]


if __name__ == "__main__":
    run_program(main)
