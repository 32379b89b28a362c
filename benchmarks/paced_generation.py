"""Generation with inference of the paper's models on 16 paced instances: every R_t beside its prediction (Figure 9)."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import paced_rank  # noqa: F401  # forked ranks have what is imported here
from harness import DATA, Figure, Measurement, named, trace_lengths
from inter_stage import ELEMENT_BYTES, Sizes
from paced_costs import paced_cost
from paced_training import Run
from processes import ALLOCATOR, Ranks
from run_report.timeline import simulate_gen_infer

from rlhfuse.simulator.threshold import sweep_threshold

INSTANCES, SEQUENCES = 16, 16  # sequences of an instance
PAIR, STRETCH = ("33B", "65B"), 8.0
MAX_PROMPT, MAX_OUTPUT = 512, 512
TRACES = {
    "arxiv": DATA / "traces" / "arxiv_llama2tok.csv",
    "azure": DATA / "traces" / "azure2023_conv.csv",
    "mooncake": DATA / "traces" / "mooncake_conversation.jsonl",
}
PERCENTS, QUICK_PERCENTS = (0, 5, 10, 20, 30, 45, 60, 80), (0, 30)
CHOICE_GOAL = 1.03  # chosen over the best


def generate(arguments: argparse.Namespace) -> None:
    traces = named("--traces", arguments.traces, {name: name for name in TRACES})
    measurement, rows = Measurement("paced_generation", arguments), []
    for name in traces[:1] if arguments.quick else traces:
        rows.append(Case(name, measurement).measure())
    columns = ("lengths", "p99.9 / p50", "serial", "predicted", "chosen R_t", "fused", "predicted", "gain", "predicted")
    columns += ("best R_t", "chosen over it", "mean error", "CPU", "late", "evidence")
    title = f"Generation with inference, {'/'.join(PAIR)}, {INSTANCES} instances; seconds of a cluster"
    measurement.table("generation", title, columns, rows)
    measurement.finish()


class Case:
    """One trace: all R_t, then serial, chosen and best in turns."""

    def __init__(self, name: str, measurement: Measurement) -> None:
        self.name, self.measurement, self.figures = name, measurement, measurement.part(name)
        quick = measurement.quick
        self.instances, longest = (2, 64) if quick else (INSTANCES, MAX_OUTPUT)
        samples = self.instances * SEQUENCES
        self.stretch, self.percents = (2.0, QUICK_PERCENTS) if quick else (STRETCH, PERCENTS)
        prompt = min(MAX_PROMPT, 4 * longest)
        self.lengths = trace_lengths(TRACES[name], samples, prompt, longest, measurement.arguments.seed)
        small = ("paced", 1, 1, 64, 64, 64, samples, prompt, longest, 8192)
        self.sizes = Sizes(*small, draft_rows=0, instances=self.instances)
        token_bytes = self.sizes.spec("actor").kv_bytes_per_token(ELEMENT_BYTES)
        cost = paced_cost(PAIR, SEQUENCES, self.lengths, longest, pads=False)
        self.cost = cost.of_run(self.stretch, token_bytes)
        self.limits = self.sizes.limits(self.cost.table, self.lengths)

    def measure(self) -> list[str]:
        made = {"sizes": asdict(self.sizes), "seed": self.measurement.arguments.seed, "cost": self.cost.to_dict()}
        best = sweep_threshold(self.lengths, self.instances, self.cost.table, self.limits).threshold
        swept = sorted({(self.sizes.samples * percent + 50) // 100 for percent in self.percents} | {best})
        with Ranks("paced_rank:PacedInstance", self.instances, ALLOCATOR, fork=True, **made) as ranks:
            ranks.ask("load", self.lengths, self.measurement.arguments.seed)
            self.ranks, self.digests = ranks, set()
            self.predicted = {r: self._predict(r) for r in swept}
            self._run(swept[-1])  # kernels are loaded, memory is allocated
            runs = {r: [self._run(r)] for r in swept}
            fastest = min(swept, key=lambda r: runs[r][0].seconds)
            for _ in range(0 if self.measurement.quick else self.measurement.arguments.rounds - 1):
                for r in sorted({0, best, fastest}):
                    runs[r].append(self._run(r))
        if len(self.digests) != 1:
            raise RuntimeError(f"{self.name}: runs at different R_t left different bits")
        return self._row(runs, best)

    def _predict(self, threshold: int) -> float:
        return simulate_gen_infer(self.lengths, self.instances, self.cost.table, self.limits, threshold).total_seconds

    def _run(self, threshold: int) -> Run:
        answers = self.ranks.ask("run", threshold, self.limits)
        self.digests |= {answer["digest"] for answer in answers}
        seconds = max(answer["total_seconds"] for answer in answers)
        run = Run.of(answers, self.predicted[threshold], seconds)
        told = f"CPU {run.cpu_share:.0%}, late {run.late_share:.2%}"
        self.measurement.say(f"{self.name}, R_t {threshold}: {seconds:.2f} s of {run.predicted:.2f} s, {told}")
        return run

    def _row(self, runs: Mapping[int, Sequence[Run]], chosen: int) -> list[str]:
        seconds = {r: statistics.median(run.seconds for run in mine) for r, mine in runs.items()}
        every, figures, samples = [run for mine in runs.values() for run in mine], self.figures, self.sizes.samples
        best = min(seconds, key=lambda r: seconds[r])
        gain = figures.figure("gain", Figure.of([seconds[0] / run.seconds for run in runs[chosen]], "x"))
        promised = figures.value("gain.predicted", self.predicted[0] / self.predicted[chosen], "x")
        over = figures.figure("chosen_over_best", Figure(seconds[chosen] / seconds[best], "x").at_most(CHOICE_GOAL))
        error = figures.value("mean_error", statistics.mean(abs(self.predicted[r] / s - 1) for r, s in seconds.items()))
        cpu = figures.value("cpu", max(run.cpu_share for run in every))
        late = figures.value("late", max(run.late_share for run in every))
        figures.figure("lateness", max(run.lateness for run in every), "s")
        rows = []
        for r, measured in seconds.items():
            predicted, mark = self.predicted[r], " chosen" if r == chosen else ""
            shown = [f"{one / self.stretch:.2f} s" for one in (measured, predicted)]
            rows.append([f"{r} ({r / samples:.0%}){mark}", *shown, f"{predicted / measured - 1:+.1%}"])
        head = ("R_t", "measured", "predicted", "error")
        self.measurement.table(f"{self.name}.sweep", f"{self.name}: every R_t, seconds of a cluster", head, rows)
        curve = [[r / samples, s / self.stretch, self.predicted[r] / self.stretch] for r, s in seconds.items()]
        self.measurement.facts(**{f"curve_{self.name}": curve})
        marks = self.lengths.percentiles()
        evidence = sum(run.is_evidence for run in every)
        shown = [f"{one / self.stretch:.2f} s" for one in (seconds[0], self.predicted[0])]
        fused = [f"{one / self.stretch:.2f} s" for one in (seconds[chosen], self.predicted[chosen])]
        ends = [f"{over.value:.3f}", f"{error:.1%}", f"{cpu:.0%}", f"{late:.2%}", f"{evidence} of {len(every)}"]
        tail = f"{marks['p999'] / marks['p50']:.1f}"
        return [self.name, tail, *shown, str(chosen), *fused, gain.text(), f"{promised:.2f}", str(best), *ends]
