"""Seconds of an iteration by part: what tools/plan.py prints for one table of layouts and a search ranks tables by.

Training is priced twice: at the proved bound of its schedule (paper section 7.3), and as reached by the fastest of a
fixed number of schedules made by rule, the same on every rank. With room for activations the two nearly always meet;
under a cap that binds a bound may be far below what any schedule reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from rlhfuse.costs.layout_moves import LayoutMove, layout_moves
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.training.passing import with_room
from rlhfuse.planning.training.training_problem import TICK_SECONDS, planned_bound
from rlhfuse.schedule.ir.evaluate import evaluate, tidy
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.schedule.search.admission_rules import AdmissionRules
from rlhfuse.schedule.search.dispatch import Dispatcher
from rlhfuse.schedule.search.heads_tails import longest_path
from rlhfuse.schedule.search.solution import sequence_of
from rlhfuse.simulator.simulation import Simulation
from rlhfuse.simulator.threshold import Threshold, sweep_threshold
from rlhfuse.tasks.instance_limits import InstanceLimits

GENERATION, SCHEDULES, STEPS = "generation and inference", "schedules of training", "optimizer steps"
MOVES, OFFLOAD, CAPTURE = "weight moves", "optimizer to the host and back", "graphs recorded"
NEAR = 0.005  # of a bound: a schedule made by rule that is so near it is near enough
DECODES, DECODED = 300, 3_000_000  # rules tried, at most, and tasks x nodes of all of them: a third of a second


@dataclass(frozen=True)
class GenerationPrice:
    """Generation and inference of an iteration, means over the batches; R_t, its curve if there is one, and why.

    `threshold_samples` None: chosen once the first iteration has shown its lengths; serial until then, and fused at
    what assumed ones give from then on. Generation alone is None where a file with the curve does not say it.
    """

    threshold_samples: int | None
    threshold: Threshold | None
    why: str
    serial: float
    fused: float
    generation_serial: float | None
    generation_fused: float | None
    agreed: float = 0.0  # until instances may score; 0: not known

    @property
    def migrates_at(self) -> int:
        """R_t in samples: as chosen, or of the curve; 0 where nothing migrates."""
        return self.threshold_samples or (self.threshold.threshold if self.threshold else 0)

    def at_least(self, floor: GenerationPrice) -> GenerationPrice:
        """With no fewer seconds than `floor` has."""
        return replace(self, serial=max(self.serial, floor.serial), fused=max(self.fused, floor.fused))


class Moves(NamedTuple):
    """Seconds in which weights move in an iteration: before generation, and beneath it."""

    before: float
    beneath: float

    @staticmethod
    def of(moves: Sequence[LayoutMove]) -> Moves:
        beneath = sum((move.seconds for move in moves if move.beneath), 0.0)
        return Moves(sum(move.seconds for move in moves if not move.beneath), beneath)

    def seen(self, generation: GenerationPrice) -> float:
        """What is not hidden: models that score wait for what is not there when instances are free."""
        return self.before + max(0.0, self.beneath - generation.agreed)


@dataclass(frozen=True)
class Price:
    """Seconds of an iteration of a draft, by what they go into."""

    generation: GenerationPrice
    schedules: float  # of training, all mini-batches
    steps: float
    moves: Moves
    offload: float  # what is not hidden of it
    capture: float
    activations: tuple[float, ...]  # of schedules, by node

    @property
    def parts(self) -> Mapping[str, float]:
        return {
            GENERATION: self.generation.fused,
            SCHEDULES: self.schedules,
            STEPS: self.steps,
            MOVES: self.moves.seen(self.generation),
            OFFLOAD: self.offload,
            CAPTURE: self.capture,
        }

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def beside_training(self) -> float:
        return self.seconds - self.schedules - self.steps - self.offload


def price(draft: Candidate, generation: GenerationPrice, moves: Moves) -> Price:
    """With training as reached; `generation`: of `price_generation`; `moves`: of all weights.

    Raises InputError where no schedule fits.
    """
    seconds, activations = reached(draft)
    return with_schedules(draft, generation, moves, seconds, activations)


def with_schedules(
    draft: Candidate, generation: GenerationPrice, moves: Moves, minibatch: float, held: tuple[float, ...] = ()
) -> Price:
    """`price` of a draft whose schedules take so long for a mini-batch; `held`: by them, else as little as can be."""
    held = held or (draft.memory.passing.least if draft.memory.passing else min_memory)(draft.training.problem)
    count, offload = draft.batch.optimizer_steps, draft.memory.offload
    seen = offload.seen_seconds(moves.before, minibatch) if offload else 0.0
    capture = graph_capture(draft, draft.memory.keeps_generation(held))
    again = capture.seconds if capture and capture.each_iteration else 0.0
    return Price(generation, count * minibatch, count * draft.step_seconds, moves, seen, again, held)


def bound_seconds(draft: Candidate) -> float:
    """Mean seconds of a mini-batch, by the makespans of schedules that are given, else the proved bounds of those that
    will be searched: each mini-batch by the one of its own number of micro-batches."""
    given = draft.training.given[0] if draft.training.given else {}

    def seconds(rung: int) -> float:
        ticks = evaluate(given[rung]).makespan if rung in given else planned_bound(draft.training.problems[rung])
        return float(ticks) * TICK_SECONDS

    return minibatch_seconds(draft, seconds)


def reached(draft: Candidate) -> tuple[float, tuple[float, ...]]:
    """The same by the fastest schedules made by rule, where none are given: a search begins with no worse. And what
    they hold, by node."""
    given, ticks, made = draft.training.given[0] if draft.training.given else {}, {}, []
    for rung, problem in {**draft.training.problems, **{rung: one.problem for rung, one in given.items()}}.items():
        graph = build_graph(problem)
        sequence = sequence_of(graph, given[rung]) if rung in given else with_room(draft.memory.passing, problem, _seek)
        made.append((graph, sequence))
        ticks[rung] = max(float(tidy(longest_path(graph.tables, sequence))), float(planned_bound(problem)))
    seconds = minibatch_seconds(draft, lambda rung: ticks[rung] * TICK_SECONDS)
    return seconds, draft.memory.held_in_order(*made)


def _seek(problem: FusionProblem) -> Iterator[np.ndarray]:
    """What the first rule makes of it, then the fastest of all."""
    problem = problem.without_idle_cap()
    yield _reached(problem, 1)
    if (tries := min(DECODES, DECODED // (problem.tasks * problem.nodes))) > 1:
        yield _reached(problem, tries)


@lru_cache(maxsize=128)  # as for bounds: tables of layouts that differ beside training have one problem
def _reached(problem: FusionProblem, tries: int) -> np.ndarray:
    enough = (1 + NEAR) * float(planned_bound(problem)) if tries > 1 else 0.0
    return _rules(problem).search(tries, enough)[0].sequence


@lru_cache(maxsize=1)  # of one problem the first rule is tried, and then the others
def _rules(problem: FusionProblem) -> AdmissionRules:
    return AdmissionRules(Dispatcher(build_graph(problem)), "1", kept=1)


def minibatch_seconds(draft: Candidate, schedule_seconds: Callable[[int], float]) -> float:
    """Mean seconds of a mini-batch, given the schedule seconds of each M1; at least what cores and hosts need."""
    given, total = (draft.ranks.shape, draft.host_seconds), 0.0
    for rung, share in draft.training.shares.items():
        least = float(draft.inputs.cores.least_time(draft.training.problems[rung], *given)) * TICK_SECONDS
        total += share * max(schedule_seconds(rung), least)
    return total


def weight_moves(draft: Candidate) -> tuple[LayoutMove, ...]:
    """Moves of all models that train, into the layouts of generation and inference."""
    machine = draft.inputs.cores.rates(draft.inputs.hardware, "moves")
    moves = layout_moves(draft.tasks, draft.ranks, draft.run.specs, draft.run.config.trainer.element_bytes, machine)
    return tuple(replace(move, seconds=draft.costs.moves.get(move.model, move.seconds)) for move in moves)


def price_generation(draft: Candidate) -> GenerationPrice:
    """With R_t as the run will have it, chosen by simulation where it is open and past lengths are known.

    Less memory is never priced as faster, though the simulated order of admissions may be luckier.
    """
    limits, ideal = draft.generation.limits, ideal_limits(draft)
    made = simulate_generation(draft, limits)
    return made if ideal == limits else made.at_least(simulate_generation(draft, ideal))


def ideal_limits(draft: Candidate) -> InstanceLimits:
    """As if generation had all memory that it can use, for its cache and for models that come early to score."""
    cache, limits = draft.generation.cache, draft.generation.limits
    early = len(draft.run.config.scorers()) if draft.inputs.hardware.device.own_memory else 0
    capacity = cache.wanted * cache.block_tokens * limits.kv_bytes_per_token
    return replace(limits, kv_capacity_bytes=capacity, early_models=early)


def simulate_generation(draft: Candidate, limits: InstanceLimits) -> GenerationPrice:
    """The price with these limits; it depends on them, the costs and the number of instances alone."""
    config, instances = draft.run.config, draft.batch.instances
    if not config.fusion.inter_stage:
        return _at(draft, limits, 0, "R_t = 0: fusion.inter_stage is false")
    if instances == 1:
        return _at(draft, limits, 0, "R_t = 0: with one generation instance none can be freed")
    if (given := config.threshold()) is not None:
        return _at(draft, limits, given, f"R_t = {given}: fusion.threshold says so")
    if threshold := draft.generation.threshold_file:
        why = f"{config.fusion.threshold_file}: {threshold.explain()}"
        if draft.inputs.lengths.known:
            return _at(draft, limits, threshold.threshold, why, threshold)
        return _of_curve(threshold, why)  # its curve was made from lengths that were known
    least = config.fusion.least_threshold
    threshold = sweep_threshold(draft.inputs.drawn.batches, instances, draft.costs, limits, least=least)
    made = _of_curve(threshold, threshold.explain())
    if draft.inputs.lengths.known:
        return made
    why = f"chosen once the first iteration has shown its lengths; at those assumed {made.why}"
    return replace(made, threshold_samples=None, why=why)


def _of_curve(threshold: Threshold, why: str) -> GenerationPrice:
    points = {point.threshold: point for point in threshold.sweep}
    serial, fused = points.get(0), points.get(threshold.threshold)
    ends = serial.generation_seconds if serial else None, fused.generation_seconds if fused else None
    whole = threshold.serial_seconds, threshold.fused_seconds
    agreed = fused.agreed_seconds if fused else 0.0
    return GenerationPrice(threshold.threshold, threshold, why, *whole, *ends, agreed)


def _at(
    draft: Candidate, limits: InstanceLimits, samples: int, why: str, threshold: Threshold | None = None
) -> GenerationPrice:
    thresholds = (0, samples)
    made = Simulation(draft.inputs.drawn.batches, draft.batch.instances, draft.costs, limits).seconds(thresholds)
    serial, fused = (made[threshold] for threshold in thresholds)
    ends = serial.total, fused.total, serial.generation, fused.generation
    return GenerationPrice(samples, threshold, why, *ends, fused.agreed)
