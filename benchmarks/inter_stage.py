"""Generation and inference of one iteration, fused beside serial, on two instances of one CPU machine.

    python benchmarks/inter_stage.py [--sizes 1:2,2:1] [--policy FOLDER]

Two processes of one thread hold a generation instance and an inference worker each, of random Llamas; lengths are those
of a real trace, scaled, and forced. Costs are fitted to a few runs, as a training fits them to its iterations; every
R_t is predicted with them and run in turn, the chosen and the fastest once more. All runs must give the same bits.
--policy measures an actor that can be guessed instead (speculation.py writes some), guessed and not.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import TRACE, Figure, Measurement, named, options, take_turns, trace_lengths
from processes import ALLOCATOR, Ranks
from run_report.timeline import GenInferTimeline, simulate_gen_infer

from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.costs.table import CostTable
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import sweep_threshold
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.migration import MigrationPlan
from rlhfuse.tools.program import run_program

INSTANCES = 2
ROLES = ("actor", "reference", "critic", "reward")
HEAD_DIM = 64
BLOCK_TOKENS = 16
ELEMENT_BYTES = 4  # float32
PERCENTS, QUICK_PERCENTS = (0, 5, 10, 20, 30, 40, 50, 60, 80, 95), (0, 20, 60)  # of the batch: the R_t that are swept
FIT_PERCENTS = (0, 20, 50)  # of the runs that costs are fitted to
STEADY, STEADY_ROUNDS = 0.98, 5  # ranks are warm when the same runs take no less than this share of the time before
QUICK_ROUNDS, FINAL_ROUNDS = 2, 7  # the last: of the R_t chosen and the fastest of the sweep
SPEEDUP_GOAL = 1.2
AGREEMENT_GOAL = 0.02  # of generation
MIGRATION_GOAL = 0.03  # of the stage
ERROR_GOAL = 0.10  # mean, predicted against measured
CHOICE_GOAL = 0.05  # chosen R_t over the best measured


@dataclass(frozen=True)
class Sizes:
    """Models, batch and packs; reference and actor are of one shape, critic and reward model of another."""

    name: str  # layers of the actor : layers of critic and reward
    layers: int
    scorer_layers: int
    hidden: int
    mlp: int
    vocab: int
    samples: int
    max_prompt: int
    max_output: int
    score_tokens: int  # of one pack
    policy: str = ""  # Hugging Face folder of the actor; it is guessed for from what it wrote before
    draft_rows: int = 16
    instances: int = INSTANCES

    def spec(self, role: str) -> ModelSpec:
        if role == "actor" and self.policy:
            return ModelSpec.from_config(Path(self.policy))
        layers = self.layers if role in ("actor", "reference") else self.scorer_layers
        heads, context = self.hidden // HEAD_DIM, self.max_prompt + self.max_output
        return ModelSpec("llama", layers, self.hidden, heads, heads, HEAD_DIM, self.mlp, self.vocab, context)

    @property
    def blocks(self) -> int:
        """KV blocks of an instance: a quarter of all samples at their longest; few get there."""
        return max(self.samples * -(-(self.max_prompt + self.max_output) // BLOCK_TOKENS) // 4, 5 * self.samples)

    def limits(self, costs: CostTable, lengths: SampleLengths) -> InstanceLimits:
        """BS_max from the costs at the batch's median context, as a training run finds it."""
        token_bytes = self.spec("actor").kv_bytes_per_token(ELEMENT_BYTES)
        limits = InstanceLimits(
            max_sequences=self.samples,
            kv_capacity_bytes=self.blocks * BLOCK_TOKENS * token_bytes,
            kv_bytes_per_token=token_bytes,
            block_tokens=BLOCK_TOKENS,
            bs_max=costs.largest_flat_batch(lengths.median_context, self.samples),
            max_prompt_tokens=self.max_prompt,
            max_output_tokens=self.max_output,
            score_tokens=self.score_tokens,
        )
        return replace(limits, move_cost=costs.move_cost(limits))


FULL = tuple(Sizes(*pair, 640, 1728, 1024, 64, 32, 384, 512) for pair in (("1:2", 6, 12), ("2:1", 6, 3)))
QUICK = (Sizes("1:2", 2, 4, 256, 704, 512, 12, 16, 64, 128),)
POLICY, QUICK_POLICY = (
    Sizes("guessed", 6, 12, 256, 688, 0, 64, 32, 384, 512),
    replace(QUICK[0], name="guessed", vocab=0),
)


@dataclass(frozen=True)
class Run:
    """Generation and inference of the batch, as the ranks told it."""

    ranks: Sequence[Mapping[str, Any]]

    @property
    def seconds(self) -> float:
        return max(rank["total_seconds"] for rank in self.ranks)

    @property
    def generation_seconds(self) -> float:
        return self.ranks[0]["generation_seconds"]

    def _generating(self, instance: int) -> list[tuple[str, float, float]]:
        return [span for span in self.ranks[instance]["spans"] if span[0] == "generate"]

    @property
    def pause_seconds(self) -> float:
        """Longest from a migrated sample's last step where it was to the first step where it went; one clock."""
        moves = MigrationPlan.parse(self.ranks[0]["plan"]).moves if self.ranks[0]["plan"] else ()
        steps = [self._generating(instance) for instance in range(len(self.ranks))]
        return max((steps[move.destination][1][1] - steps[move.source][0][2] for move in moves), default=0.0)

    @property
    def migration_seconds(self) -> float:
        """From the last instance's last step before the trigger until the last destination decodes again."""
        if not self.ranks[0]["plan"]:
            return 0.0
        plan = MigrationPlan.parse(self.ranks[0]["plan"])
        begun = max(self._generating(instance)[0][2] for instance in range(len(self.ranks)))
        return max(self._generating(instance)[1][1] for instance in plan.destinations) - begun


@dataclass(frozen=True)
class Point:
    """One R_t; 0 is serial."""

    threshold: int
    predicted: GenInferTimeline
    ideal: GenInferTimeline  # migration and loading free
    runs: Sequence[Run]  # by round

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def error(self) -> float:
        return self.predicted.total_seconds / self.seconds - 1

    @property
    def generation_seconds(self) -> float:
        return statistics.median(run.generation_seconds for run in self.runs)

    def ideal_seconds(self, work: float) -> float:
        """With free migration and loading, and `work` seconds of scoring, cut as finely as one likes.

        The destinations score from the end of generation G on, the freed from the trigger t: n instances end together
        after max(G, (m G + (n - m) t + work) / n).
        """
        generation = self.ideal.generation_seconds
        if not self.ideal.plan:
            return generation + work / INSTANCES
        count, trigger = len(self.ideal.plan.destinations), self.ideal.trigger_seconds
        return max(generation, (count * generation + (INSTANCES - count) * trigger + work) / INSTANCES)


# rows as a run observes them: what work is taken to cost before any run was seen, and where a run saw none of a kind
GUESS = {
    "step": [(1, 32, 0, 5e-3), (8, 256, 0, 8e-3), (1, 32, 32, 5e-3)],
    "score": [(512, 8, 0.2)],
    "migration": [(1 << 20, 2e-3)],
    "load": [(0.0,)],
    "meeting": [(0.0,)],
    "release": [(0.0,)],
}


def fit_costs(runs: Sequence[Run], free_moves: bool = False) -> CostTable:
    """From what the runs observed, as a training fits its costs; `free_moves`: migration and loading take no time."""
    rows: dict[str, list[Any]] = {kind: [] for kind in GUESS}
    for run in runs:
        for kind, seen in run.ranks[0]["observations"].items():
            rows.setdefault(kind, []).extend(seen)
    rows = {kind: seen or list(GUESS.get(kind, ())) for kind, seen in rows.items()}
    if free_moves:
        rows |= {"migration": [(1, 0.0)], "load": [(0.0,)]}
    return MeasuredCost.fit(
        [StepObservation(*row) for row in rows["step"]],
        rows["score"],
        rows["migration"],
        *([row[0] for row in rows[kind]] for kind in ("load", "meeting", "release")),
    ).table


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--sizes", default=FULL[0].name, help=f"some of {', '.join(sizes.name for sizes in FULL)}")
    parser.add_argument("--policy", metavar="FOLDER", help="measure this actor, with and without guesses, instead")
    parser.add_argument("--lengths", default=TRACE, metavar="FILE", help="csv, jsonl or parquet with both lengths")
    arguments = parser.parse_args()
    cases = named("--sizes", arguments.sizes, {sizes.name: sizes for sizes in (QUICK if arguments.quick else FULL)})
    if arguments.policy:
        policy, vocab = arguments.policy, ModelSpec.from_config(Path(arguments.policy)).vocab
        guessed = replace(QUICK_POLICY if arguments.quick else POLICY, policy=policy, vocab=vocab)
        cases = [guessed, replace(guessed, name="plain", draft_rows=0)]
    lengths = {
        one.name: trace_lengths(arguments.lengths, one.samples, one.max_prompt, one.max_output, arguments.seed)
        for one in cases
    }
    measurement, rows, choices = Measurement("inter_stage", arguments), [], []
    digests: set[str] = set()
    for sizes in cases:
        made = {"sizes": asdict(sizes), "seed": arguments.seed}
        with Ranks("inter_stage_rank:FusionRank", INSTANCES, ALLOCATOR, **made) as ranks:
            case = Case(sizes, lengths[sizes.name], ranks, measurement)
            row, choice = case.measure()
        digests |= case.digests
        if arguments.policy and len(digests) != 1:
            raise RuntimeError("guesses changed a sample")
        rows.append(row)
        choices.append(choice)
    head = ("models", "samples", "output p50, max", "T_inf/T_gen", "serial", "fused", "speedup", "predicted")
    measurement.table("speed", "Generation with inference, fused beside serial", (*head, "ideal", "bound"), rows)
    head = ("models", "R_t chosen", "fastest", "chosen over fastest", "in the sweep", "mean error", "agreement")
    measurement.table("choice", "R_t", (*head, "migration", "pause", "moved", "had to move"), choices)
    measurement.finish()


class Case:
    """One pair of models: fit, predict, let all R_t take turns."""

    def __init__(self, sizes: Sizes, lengths: SampleLengths, ranks: Ranks, measurement: Measurement) -> None:
        self.sizes, self.lengths, self.ranks, self.measurement = sizes, lengths, ranks, measurement
        self.figures = measurement.part(sizes.name.replace(":", "to"))
        arguments = measurement.arguments
        self.rounds, self.final_rounds, self.percents = arguments.rounds, FINAL_ROUNDS, PERCENTS
        if arguments.quick:
            self.rounds, self.final_rounds, self.percents = QUICK_ROUNDS, QUICK_ROUNDS, QUICK_PERCENTS
        self.digests: set[str] = set()
        ranks.ask("load", lengths, arguments.seed)

    def measure(self) -> tuple[list[str], list[str]]:
        """The rows of the speedups and of the choice."""
        self._price([])
        fitting = self._thresholds(FIT_PERCENTS)
        runs = [self._run(threshold) for threshold in fitting]  # compiles, allocates
        for _ in range(STEADY_ROUNDS):  # for a minute and more they get faster: costs fitted before would be too high
            before, runs = runs, [self._run(threshold) for threshold in fitting]
            if sum(run.seconds for run in runs) > STEADY * sum(run.seconds for run in before):
                break
        self._price(runs)
        chosen = sweep_threshold(self.lengths, INSTANCES, self.costs, self.limits).threshold
        swept = sorted({*self._thresholds(self.percents), chosen})
        runs = take_turns({str(r): lambda _, r=r: self._run(r) for r in swept}, self.rounds)
        points = {r: self._point(r, runs[str(r)]) for r in swept}
        best = min(swept, key=lambda r: points[r].seconds)
        pairs = sorted({0, chosen, best})  # serial, the choice and the fastest once more, in pairs
        final = take_turns({str(r): lambda _, r=r: self._run(r) for r in pairs}, self.final_rounds)
        if len(self.digests) != 1:
            raise RuntimeError(f"{self.sizes.name}: runs at different R_t left different bits")
        self._sweep_table(points, chosen)
        seconds = {r: [run.seconds for run in final[str(r)]] for r in pairs}
        return self._speed_row(points, chosen, seconds), self._choice_row(
            points, chosen, best, seconds, final[str(chosen)]
        )

    def _price(self, runs: Sequence[Run]) -> None:
        self.costs, self.free = fit_costs(runs), fit_costs(runs, free_moves=True)
        self.limits = self.sizes.limits(self.costs, self.lengths)

    def _thresholds(self, percents: Sequence[int]) -> list[int]:
        """R_t in samples, ascending, each once."""
        return sorted({(self.sizes.samples * percent + 50) // 100 for percent in percents})

    def _run(self, threshold: int) -> Run:
        run = Run(self.ranks.ask("run", threshold, self.limits))
        self.measurement.say(f"{self.sizes.name}, R_t {threshold}: {run.seconds:.2f} s")
        self.digests |= {rank["digest"] for rank in run.ranks}
        return run

    def _point(self, threshold: int, runs: Sequence[Run]) -> Point:
        timelines = (
            simulate_gen_infer(self.lengths, INSTANCES, costs, self.limits, threshold)
            for costs in (self.costs, self.free)
        )
        return Point(threshold, *timelines, runs)

    def _sweep_table(self, points: Mapping[int, Point], chosen: int) -> None:
        rows = []
        for r, point in points.items():
            predicted, early = point.predicted, statistics.median(run.ranks[0]["early"] for run in point.runs)
            seconds = [f"{value:.2f} s" for value in (point.seconds, predicted.total_seconds)]
            generation = [f"{value:.2f} s" for value in (point.generation_seconds, predicted.generation_seconds)]
            name = f"{r} (chosen)" if r == chosen else f"{r}"
            rows.append([name, *seconds, f"{point.error:+.1%}", *generation, f"{early:.0f} of {self.sizes.samples}"])
        head = ("R_t", "measured", "predicted", "error", "generation", "predicted", "scored before its end")
        self.measurement.table(f"{self.figures.name}.sweep", f"{self.sizes.name}: every R_t", head, rows)

    def _speed_row(self, points: Mapping[int, Point], chosen: int, seconds: Mapping[int, Sequence[float]]) -> list[str]:
        serial, fused, value = points[0], points[chosen], self.figures.value
        speedup = self.figures.figure("speedup", Figure.ratio(seconds[0], seconds[chosen]).at_least(SPEEDUP_GOAL))
        predicted = value("speedup_predicted", serial.predicted.total_seconds / fused.predicted.total_seconds)
        share = value("inference_over_generation", serial.seconds / serial.generation_seconds - 1)
        work = sum(span.end - span.start for span in serial.ideal.spans if span.kind == "score")
        best = min(point.ideal_seconds(work) for point in points.values())
        ideal, lengths = value("ideal", serial.ideal_seconds(work) / best), self.lengths.percentiles()
        medians = [value(name, Figure.of(seconds[r], "s")) for name, r in (("serial", 0), ("fused", chosen))]
        cells = [str(self.sizes.samples), f"{lengths['p50']}, {lengths['max']}", f"{share:.2f}"]
        cells += [*(f"{median:.2f} s" for median in medians), speedup.text()]
        return [self.sizes.name, *cells, *(f"{one:.2f}" for one in (predicted, ideal, 1 + share))]

    def _choice_row(
        self,
        points: Mapping[int, Point],
        chosen: int,
        best: int,
        seconds: Mapping[int, Sequence[float]],
        runs: Sequence[Run],
    ) -> list[str]:
        """The fastest of so many is fast by luck too: the later `runs` say how far the choice lies behind it."""
        value = self.figures.value
        behind = Figure.of([a / b - 1 for a, b in zip(seconds[chosen], seconds[best])]).at_most(CHOICE_GOAL)
        swept = points[chosen].seconds / points[best].seconds - 1
        errors = [abs(point.error) for point in points.values()]
        error = replace(Figure.of(errors), value=statistics.mean(errors)).at_most(ERROR_GOAL)
        agreement = Figure.of([run.ranks[0]["agreement_seconds"] / run.generation_seconds for run in runs])
        migration = Figure.of([run.migration_seconds / run.seconds for run in runs])
        shares = [
            value("chosen_over_best", behind),
            value("chosen_over_best_of_sweep", swept),
            value("mean_error", error),
        ]
        costs = [
            value("agreement", agreement.at_most(AGREEMENT_GOAL)),
            value("migration", migration.at_most(MIGRATION_GOAL)),
        ]
        pause = value("pause", Figure.of([1e3 * run.pause_seconds for run in runs], "ms"))
        names = ("migrated_bytes", "needed_bytes")
        moved = [value(name, Figure.of([run.ranks[0][name] for run in runs], "bytes")) for name in names]
        cells = [str(chosen), str(best), *(f"{one:.1%}" for one in shares), *(f"{one:.2%}" for one in costs)]
        return [self.sizes.name, *cells, f"{pause:.0f} ms", *(f"{one / 1e6:.2f} MB" for one in moved)]


if __name__ == "__main__":
    run_program(main)
