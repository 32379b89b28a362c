"""Samples that pause for a tool: one by one, fused, beside serial and beside rounds, on two instances of one machine.

    python benchmarks/tool_pauses.py

Batch and costs are those of inter_stage.py, models smaller. Some tokens end a turn; the tool takes 200 ms +- 150 ms,
by sample and turn alone. In rounds an instance waits until all its samples have ended a turn and the last call is done;
calls begin as turns end and run in parallel. Every R_t is predicted and run in turn, then serial, rounds, the R_t
chosen and the fastest once more. All runs must give the same bits.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from harness import TRACE, Figure, Measurement, options, take_turns, trace_lengths
from inter_stage import (
    FINAL_ROUNDS,
    FIT_PERCENTS,
    INSTANCES,
    PERCENTS,
    QUICK,
    QUICK_PERCENTS,
    QUICK_ROUNDS,
    STEADY,
    STEADY_ROUNDS,
    Run,
    Sizes,
    fit_costs,
)
from processes import ALLOCATOR, Ranks
from run_report.timeline import simulate_gen_infer

from rlhfuse.base.errors import run_program
from rlhfuse.costs.table import CostTable
from rlhfuse.decisions.instance_limits import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths, read_turns
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.simulator.threshold import sweep_threshold

FULL = Sizes("tools", 4, 8, 384, 1024, 1024, 64, 32, 384, 512)
SERIAL, ROUNDS = "serial", "rounds"
ERROR_GOAL = 0.10  # predicted against measured
CHOICE_GOAL = 0.05  # chosen R_t over the fastest


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--lengths", default=TRACE, metavar="FILE", help="csv, jsonl or parquet with both lengths")
    arguments = parser.parse_args()
    sizes = QUICK[0] if arguments.quick else FULL
    drawn = trace_lengths(arguments.lengths, sizes.samples, sizes.max_prompt, sizes.max_output, arguments.seed)
    measurement = Measurement("tool_pauses", arguments)
    with Ranks("tool_pauses_rank:ToolRank", INSTANCES, ALLOCATOR, sizes=asdict(sizes), seed=arguments.seed) as ranks:
        ranks.ask("load", drawn, arguments.seed)
        Case(sizes, drawn, ranks, measurement).measure()
    measurement.finish()


class Case:
    """Fit, predict, let all R_t and then the sides take turns."""

    def __init__(self, sizes: Sizes, lengths: SampleLengths, ranks: Ranks, measurement: Measurement) -> None:
        """`lengths`: of the longest responses; where samples pause is seen in the first run."""
        self.sizes, self.lengths, self.ranks, self.measurement = sizes, lengths, ranks, measurement
        self.digests: set[str] = set()
        self._price([])

    def measure(self) -> None:
        quick = self.measurement.quick
        fitting, percents = self._thresholds(FIT_PERCENTS), QUICK_PERCENTS if quick else PERCENTS
        runs = [self._run(threshold) for threshold in fitting]  # compiles, allocates
        for _ in range(STEADY_ROUNDS):
            before, runs = runs, [self._run(threshold) for threshold in fitting]
            if sum(run.seconds for run in runs) > STEADY * sum(run.seconds for run in before):
                break
        self._price(runs)
        chosen = sweep_threshold(self.lengths, INSTANCES, self.costs, self.limits).threshold
        swept = sorted({*self._thresholds(percents), chosen})
        rounds, final = self.measurement.arguments.rounds, FINAL_ROUNDS
        if quick:
            rounds = final = QUICK_ROUNDS
        seen = take_turns({str(r): lambda _, r=r: self._run(r) for r in swept}, rounds)
        seconds = {r: [run.seconds for run in seen[str(r)]] for r in swept}
        best = min(swept, key=lambda r: statistics.median(seconds[r]))
        sides = {str(r): lambda _, r=r: self._run(r) for r in {chosen, best, 0}}
        ended = take_turns(sides | {ROUNDS: lambda _: self._run(0, in_rounds=True)}, final)
        if len(self.digests) != 1:
            raise RuntimeError("runs left different bits")
        self._sweep_table(seconds, chosen)
        self._figures({name: [run.seconds for run in of] for name, of in ended.items()}, seconds, chosen, best)

    def _price(self, runs: Sequence[Run]) -> None:
        self.costs = fit_costs(runs)
        if runs:
            rank = runs[0].ranks[0]
            turns = read_turns([rank["turns"][sample] for sample in range(self.sizes.samples)])
            self.lengths = SampleLengths(self.lengths.prompt, tuple(rank["outputs"]), turns=turns)
        self.limits = self._limits(self.costs)

    def _limits(self, costs: CostTable) -> InstanceLimits:
        limits = self.sizes.limits(costs, self.lengths)
        step = costs.decode_step_seconds(limits.bs_max, limits.bs_max * self.lengths.median_context)
        return replace(limits, active_share=self.lengths.active_share(step))

    def _thresholds(self, percents: Sequence[int]) -> list[int]:
        return sorted({(self.sizes.samples * percent + 50) // 100 for percent in percents})

    def _run(self, threshold: int, in_rounds: bool = False) -> Run:
        run = Run(self.ranks.ask("run", threshold, self.limits, in_rounds))
        name = ROUNDS if in_rounds else f"R_t {threshold}" if threshold else SERIAL
        self.measurement.say(f"{name}: {run.seconds:.2f} s")
        self.digests |= {rank["digest"] for rank in run.ranks}
        return run

    def _predicted(self, threshold: int) -> float:
        return simulate_gen_infer(self.lengths, INSTANCES, self.costs, self.limits, threshold).total_seconds

    def _bound(self) -> float:
        """Seconds that no order goes below, as simulated: the batch without pauses at its best R_t, and each sample
        alone."""
        plain = replace(self.lengths, turns=())
        samples = range(len(plain))
        batch = sweep_threshold(plain, INSTANCES, self.costs, self.limits)
        alone = (
            SampleLengths((self.lengths.prompt[i],), (self.lengths.output[i],), turns=(self.lengths.turns[i],))
            for i in samples
        )
        longest = max(Simulation([one], 1, self.costs, self.limits).seconds([0])[0].total for one in alone)
        return max(longest, min(point.fused_seconds for point in batch.sweep))

    def _sweep_table(self, seconds: Mapping[int, Sequence[float]], chosen: int) -> None:
        rows = []
        for r, measured in seconds.items():
            predicted, median = self._predicted(r), statistics.median(measured)
            name = f"{r} (chosen)" if r == chosen else str(r)
            rows.append([name, f"{median:.2f} s", f"{predicted:.2f} s", f"{predicted / median - 1:+.1%}"])
        self.measurement.table("sweep", "Every R_t", ("R_t", "measured", "predicted", "error"), rows)

    def _figures(
        self, final: Mapping[str, Sequence[float]], swept: Mapping[int, Sequence[float]], chosen: int, best: int
    ) -> None:
        keep, serial, fused, rounds = self.measurement.figure, final["0"], final[str(chosen)], final[ROUNDS]
        over_rounds = keep("over_rounds", Figure.ratio(rounds, fused))
        over_serial = keep("over_serial", Figure.ratio(serial, fused))
        serial_over_rounds = keep("serial_over_rounds", Figure.ratio(rounds, serial))
        bound = keep("bound", self._bound(), "s")
        keep("over_rounds_at_most", statistics.median(rounds) / bound.value, "x")
        predicted = keep("over_serial_predicted", self._predicted(0) / self._predicted(chosen), "x")
        errors = [abs(self._predicted(r) / statistics.median(measured) - 1) for r, measured in swept.items()]
        error = replace(Figure.of(errors), value=statistics.mean(errors))
        keep("mean_error", error.at_most(ERROR_GOAL))
        behind = Figure.of([one / other - 1 for one, other in zip(fused, final[str(best)])])
        keep("chosen_over_best", behind.at_most(CHOICE_GOAL))
        turns = [len(own) for own in self.lengths.turns]
        keep("turns", statistics.mean(turns), "of a sample")
        keep("active_share", self.limits.active_share)
        rows = [
            [name, f"{Figure.of(of).text()} s", f"{statistics.median(of) / bound.value:.2f}", beside]
            for name, of, beside in (
                ("rounds", rounds, ""),
                ("one by one, serial", serial, f"{serial_over_rounds.text()} of rounds"),
                (f"one by one, R_t {chosen}", fused, f"{over_rounds.text()} of rounds, {over_serial.text()} of serial"),
            )
        ]
        batch = f"{len(turns)} samples, {statistics.mean(turns):.1f} turns each"
        title = f"{batch}; serial over fused as predicted: {predicted.text()}"
        self.measurement.table("speed", title, ("side", "seconds", "over the bound", "times as fast"), rows)


if __name__ == "__main__":
    run_program(main)
