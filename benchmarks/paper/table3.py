"""The twelve settings of the paper's Table 3, with everything its authors published about them.

Costs are whole ticks per stage and micro-batch, a backward takes two forwards, activations are in one unit of memory.
`PRINTED` is the table of section 7.3: speed-ups and peak memory relative to serial 1F1B. `TRACED` is what the schedules
in the authors' repository amount to; the two differ in a few cells. Nothing here is measured by this project.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

from rlhfuse.schedule.ir.problem import FusionProblem, Number, Pipeline
from rlhfuse.schedule.rules.builders import serial_makespan

# models; of the large and the small one stages, micro-batches, forward, activation; a row of PRINTED; one of TRACED
_ROWS = """
33B/13B  8  4  8  4 5 4 1.95 2 1.10 1.29 1.38 1.38 1.51 1.00 309 225 239 225  15.6  23.6  15.6
33B/13B  8  4 16  8 5 4 1.95 2 1.06 1.12 1.30 1.30 2.14 1.00 477 372 425 372  15.6  33.3 15.75
33B/13B  8  4 32 16 5 4 1.95 2 1.03 1.10 1.15 1.15 2.75 1.26 813 708 741 708  15.6  42.9  19.7
33B/13B  8  8  8  8 5 2 1.95 1 1.07 1.40 1.40 1.40 1.51 1.00 315 225 225 225  15.6  23.6  15.6
33B/13B  8  8 16 16 5 2 1.95 1 1.05 1.15 1.32 1.32 2.00 1.19 483 366 419 366  15.6 31.25 18.55
33B/13B  8  8 32 32 5 2 1.95 1 1.03 1.08 1.17 1.17 2.75 1.31 819 702 755 702  15.6  42.9  20.5
65B/33B 16  8 16  8 2 2 1.64 2 1.05 1.28 1.48 1.48 1.61 1.00 276 186 214 186 26.24 42.24 26.24
65B/33B 16  8 32 16 2 2 1.64 2 1.03 1.14 1.27 1.27 2.23 1.00 420 330 366 330 26.24 58.48 29.88
65B/33B 16  8 64 32 2 2 1.64 2 1.02 1.12 1.15 1.15 2.88 1.26 708 618 632 618 26.24 75.44 39.72
65B/33B 16 16 16 16 2 1 1.64 1 1.03 1.27 1.50 1.50 1.57 1.00 279 186 219 186 26.24 41.24 26.24
65B/33B 16 16 32 32 2 1 1.64 1 1.02 1.16 1.33 1.33 2.00 1.22 423 318 363 318 26.24 52.48 32.16
65B/33B 16 16 64 64 2 1 1.64 1 1.01 1.09 1.16 1.17 2.88 1.47 711 606 651 613 26.24 75.44 38.72
"""


@dataclass(frozen=True)
class Setting:
    """`stages`, `microbatches` (of one pipeline), `forward`, `activation`: of the large model and of the small one."""

    models: str
    stages: tuple[int, int]
    microbatches: tuple[int, int]
    forward: tuple[int, int]
    activation: tuple[Number, Number]

    @property
    def name(self) -> str:
        """Stages and micro-batches of the large model, as the rows of the table are told apart."""
        return f"{self.stages[0]}/{self.stages[1]} x{self.microbatches[0]}"

    def problem(self) -> FusionProblem:
        """The fused problem: no cap, no transfer time."""
        (p0, p1), (m0, m1) = self.stages, self.microbatches
        pipelines = [self._pipeline("actor", "actor", 0, tuple(range(p0)), m0)]
        for k in range(p0 // p1):
            block = tuple(reversed(range(k * p1, (k + 1) * p1)))
            pipelines.append(self._pipeline(f"critic.{k}", "critic", 1, block, m1))
        return FusionProblem(p0, tuple(pipelines))

    def halved(self) -> Setting:
        """Half the stages, each twice as long, and half the micro-batches: what 1F1B+ runs one after the other."""

        def half(pair: tuple[int, int]) -> tuple[int, int]:
            return pair[0] // 2, pair[1] // 2

        twice = (2 * self.forward[0], 2 * self.forward[1])
        return Setting(self.models, half(self.stages), half(self.microbatches), twice, self.activation)

    def _pipeline(self, name: str, model: str, which: int, placement: tuple[int, ...], microbatches: int) -> Pipeline:
        forward, activation, stages = self.forward[which], self.activation[which], len(placement)
        times = ((forward,) * stages, (2 * forward,) * stages)
        return Pipeline(name, model, placement, microbatches, *times, (activation,) * stages)


# a row of the paper's Table 3, relative to serial 1F1B: speed-ups, then peak memory
Printed = namedtuple("Printed", "one_f_one_b_plus greedy ours lower_bound greedy_memory ours_memory")
# a row of the authors' repository: makespans in ticks, peak memory in units; `ours` is their best trace
Traced = namedtuple("Traced", "serial lower_bound greedy ours serial_memory greedy_memory ours_memory")


def _row(line: str) -> tuple[Setting, Printed, Traced]:
    models, *words = line.split()
    numbers = [int(word) if word.isdigit() else float(word) for word in words]
    pairs = [tuple(numbers[first : first + 2]) for first in (0, 2, 4, 6)]
    return Setting(models, *pairs), Printed(*numbers[8:14]), Traced(*numbers[14:])


SETTINGS, PRINTED, TRACED = zip(*map(_row, _ROWS.strip().splitlines()))


def one_f_one_b_plus_makespan(setting: Setting) -> Number:
    """Ticks of 1F1B+: serial 1F1B on pipelines of half the depth, with twice the data parallelism."""
    return serial_makespan(setting.halved().problem())
