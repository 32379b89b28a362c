"""Makes the plan of a run from its draft: training schedules, R_t, predicted seconds, and why.

A search within a time limit gives no two processes the same schedule, so one process makes the plan, and the ranks
receive its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhfuse.base.kernel_cache import compile_apart
from rlhfuse.config.rules import idle_settings
from rlhfuse.costs.machine import ranks_on_machine
from rlhfuse.planning.candidate import Candidate, draft_plan
from rlhfuse.planning.draft_kernels import compile_for_drafts
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.memory_plan import MemoryPlan
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.price import Moves, minibatch_seconds, price_generation, weight_moves
from rlhfuse.planning.report.efficiency import efficiency
from rlhfuse.planning.report.reasons import UNTIL_THEN, Reasons, host_limits, of_keeping
from rlhfuse.planning.report.report import (
    GenerationPlan,
    MinibatchSeconds,
    PlannedRanks,
    PlanReport,
    ScheduleSummary,
    ThresholdPlan,
)
from rlhfuse.planning.report.traffic import traffic
from rlhfuse.planning.settle import settle
from rlhfuse.planning.training.schedule_family import schedule_family
from rlhfuse.planning.training.stage_cuts import stage_balances
from rlhfuse.planning.training.training_orders import other_promises
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound, quick_bound
from rlhfuse.schedule.ir.evaluate import Timeline, evaluate, idle_share
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import min_memory, serial_makespan
from rlhfuse.schedule.search.worker import kernel_group
from rlhfuse.simulator import simulation
from rlhfuse.simulator.iteration_seconds import IterationSeconds
from rlhfuse.tasks.iteration import Iteration


def plan_job(job: Job) -> Plan:
    """The plan of a job, with the schedules of the run that is resumed where they still fit.

    Kernels that are not in numba's cache are compiled in processes of their own, which give the compiler's memory back.
    Raises InputError for a setting that cannot be, or as `make_plan`.
    """
    compile_for_drafts()
    draft = draft_plan(settle(job), job.recent)
    if not draft.training.given:
        compile_apart([simulation.kernel_group(), kernel_group()])
    return make_plan(draft, job.schedule_file)


def make_plan(draft: Candidate, kept: Path | None = None) -> Plan:
    """Decide what is left to decide; `kept`: schedule.json of the run that is resumed.

    Raises ScheduleError where a schedule could hang or passes the memory cap, InputError where it does not fit.
    """
    config, training = draft.run.config, draft.training
    family = config.fusion, config.trainer.seed, draft.problems, training.shares, draft.ranks.shape
    schedules, source = schedule_family(*family, kept, passing=draft.memory.passing)
    draft.memory.check(draft.memory.held_by(*schedules.values()), min_memory(training.problem), source)
    report = _report(draft, schedules, source)
    on_device = draft.run.given.with_(trainer={"device": config.trainer.device})
    plan = Plan(
        config=draft.config,
        document=report.to_dict(),
        summary=report.render(),
        notes=tuple(filter(None, (idle_settings(on_device), *draft.run.lines))),
        schedules=schedules,
        tied=draft.run.tied,
        reduction=draft.inputs.hardware.device.reduction,
        cores=draft.run.host.cores,
        costs_name=draft.costs_name,
        pace=draft.inputs.paced,
        costs=draft.costs,
    )
    _ = plan.programs, plan.iteration  # one that could hang is found here
    return plan


def _report(draft: Candidate, schedules: Mapping[int, Schedule], source: str) -> PlanReport:
    batch, inputs, limits = draft.batch, draft.inputs, draft.generation.limits
    reasons = Reasons(draft.run)
    summary, peaks = _summary(draft, schedules, source), draft.memory.held_by(*schedules.values())
    memory = MemoryPlan.of(draft.memory, peaks, ranks_on_machine(inputs.hardware, draft.run.world_size))
    capture = graph_capture(draft, memory.keeps_generation)
    generation = price_generation(draft)
    hints = (UNTIL_THEN,) if generation.threshold_samples is None else ()
    told = (generation.why, *hints, reasons.instance_limits(limits))
    threshold = ThresholdPlan(generation.threshold_samples, generation.threshold, told)
    moves = weight_moves(draft)
    steps = draft.step_seconds
    serial = {one.microbatches: one.serial_makespan_seconds for one in summary.by_microbatches}
    moving, offload = Moves.of(moves), draft.memory.offload
    seen = offload.seen_seconds(moving.before, summary.makespan_seconds) if offload else 0.0
    predicted = IterationSeconds(
        moving.seen(generation) + seen,
        generation.serial,
        generation.fused,
        batch.optimizer_steps * (minibatch_seconds(draft, serial.__getitem__) + steps),
        batch.optimizer_steps * (minibatch_seconds(draft, summary.seconds_of) + steps),
        generation.generation_serial,
        generation.generation_fused,
        capture.seconds if capture and capture.each_iteration else 0.0,
    )
    return PlanReport(
        ranks=PlannedRanks(draft.run.world_size, inputs.hardware.name, draft.run.config.trainer.dtype, draft.paced),
        iteration=Iteration.of(draft.tasks, bool(draft.config.reward.function)),
        batch=batch,
        memory=memory,
        weight_moves=moves,
        seconds=predicted,
        schedule=summary,
        efficiency=efficiency(draft, predicted.training_fused),
        threshold=threshold,
        generation=GenerationPlan(limits, capture),
        files=reasons.output_files(),
        reasons=(
            *reasons.choices(batch, draft.generation.cache),
            *reasons.learning_rates(),
            reasons.ends(),
            f"{inputs.lengths.told}; times are means of {len(inputs.drawn.batches)} batches drawn from them",
            *reasons.drawn_again(inputs.lengths),
            *reasons.left_out(inputs.lengths),
            reasons.source_of_costs(inputs.hardware, draft.costs, draft.costs_name),
            *inputs.cores.lines(draft.run.world_size),
            *host_limits(draft),
            *reasons.reward_calls(draft.costs),
            draft.training.split.why,
            *of_keeping(draft.memory, peaks),
            *reasons.offload(draft.memory, seen),
            *((str(capture),) if capture else ()),
            *reasons.early_loading(draft.memory, draft.costs),
        ),
        traffic=traffic(draft, moves, generation.migrates_at),
    )


def _summary(draft: Candidate, schedules: Mapping[int, Schedule], source: str) -> ScheduleSummary:
    training, config = draft.training, draft.run.config
    timelines = {rung: evaluate(schedule) for rung, schedule in schedules.items()}
    every = tuple(_seconds(draft, rung, timelines[rung]) for rung in sorted(schedules))

    def mean(name: str) -> float:
        return sum(one.share * getattr(one, name) for one in every)

    idle = idle_share(timelines[training.likeliest], serial_makespan(training.split.whole))
    split, shape = training.split, draft.ranks.shape
    return ScheduleSummary(
        source=source,
        nodes=shape.nodes,
        makespan_seconds=mean("makespan_seconds"),
        lower_bound_seconds=mean("lower_bound_seconds"),
        serial_makespan_seconds=mean("serial_makespan_seconds"),
        serial_idle=idle,
        peak_activation_bytes=max(float(timeline.peak_memory) for timeline in timelines.values()),
        alternates=config.fusion.alternates,
        stages=stage_balances(draft.tasks, draft.analytic, draft.costs, draft.work.longest),
        others=other_promises(config.fusion, config.trainer.seed, training.problem, split, shape),
        by_microbatches=every,
    )


def _seconds(draft: Candidate, rung: int, timeline: Timeline) -> MinibatchSeconds:
    """Seconds of mini-batches with so many micro-batches; where none is drawn with as many a quick bound does."""
    share, problem = draft.training.shares.get(rung, 0.0), draft.problems[rung]
    bound, serial = (latency_bound if share else quick_bound)(problem), draft.stated(rung, frozenset())
    ticks = timeline.makespan, bound, serial_makespan(serial)
    return MinibatchSeconds(rung, share, *(float(one) * TICK_SECONDS for one in ticks))
