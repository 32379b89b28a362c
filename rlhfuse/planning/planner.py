"""Makes the plan of a run from its draft: training schedule, programs, R_t, predicted seconds, and why.

A search within a time limit gives no two ranks the same schedule, so one process makes the plan and sends it as text;
all others parse it onto their own draft. The programs that run are lowered once, from the problem that was searched.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.costs.machine import ranks_on_machine
from rlhfuse.planning.draft import PlanDraft
from rlhfuse.planning.efficiency import efficiency, optimizer_step_seconds
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.memory.memory_plan import MemoryPlan
from rlhfuse.planning.price import minibatch_seconds, price_generation, weight_moves
from rlhfuse.planning.reasons import Reasons, of_keeping, of_memory
from rlhfuse.planning.run_plan import (
    GenerationPlan,
    PlannedRanks,
    PlanReport,
    RunPlan,
    ScheduleSummary,
    ThresholdPlan,
)
from rlhfuse.planning.training.stage_cuts import stage_balances
from rlhfuse.planning.training.training_orders import other_promises
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.evaluate import evaluate, idle_share
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import serial_makespan
from rlhfuse.schedule.search.library import Library
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.schedule.search.solution import Incumbent
from rlhfuse.simulator.instance_limits import move_cost
from rlhfuse.simulator.iteration_seconds import IterationSeconds


def make_plan(draft: PlanDraft, kept: Path | None = None) -> RunPlan:
    """Decide what is left to decide; `kept`: schedule.json of the run that is resumed.

    Raises ScheduleError where the schedule could hang or passes the memory cap.
    """
    schedule, source = draft.training.given or (kept and _kept(draft, kept)) or _search(draft)
    return _run_plan(draft, schedule, _report(draft, schedule, source))


def parse_plan(draft: PlanDraft, text: str) -> RunPlan:
    """A plan that another rank made and sent with `RunPlan.to_text`; its schedule is verified here too."""
    raw = json.loads(text)
    schedule = Schedule.parse(draft.training.problem, raw["schedule"])
    return _run_plan(draft, schedule, PlanReport.from_dict(raw["report"]))


def _run_plan(draft: PlanDraft, schedule: Schedule, report: PlanReport) -> RunPlan:
    reduce = draft.inputs.hardware.device.reduction
    programs = lower(schedule, draft.ranks, tied=draft.run.tied, reduce=reduce)
    verify(programs, schedule, draft.ranks, tied=draft.run.tied, one_queue=reduce == "joint")
    return RunPlan(report, schedule, draft.ranks, programs, draft.costs, draft.costs_name)


def _kept(draft: PlanDraft, file: Path) -> tuple[Schedule, str] | None:
    """The order that the run had, unless layouts, micro-batches or memory are others now."""
    problem = draft.training.problem
    try:
        schedule = Schedule(problem, load_schedule(file, expect=problem).orders)
    except InputError:
        return None
    return (schedule, f"as before, from {file}") if Incumbent.of(schedule).fits() else None


def _search(draft: PlanDraft) -> tuple[Schedule, str]:
    """A fused schedule under the draft's memory cap, and how it was found."""
    config = draft.run.config
    settings = SearchSettings(time_limit=config.fusion.search_seconds, seed=config.trainer.seed, objective="memory")
    library = Library.at(config.fusion.library)
    known = library.find(draft.training.problem)
    schedule, report = search(draft.training.problem, settings, start=known)
    library.keep(schedule)
    proved = "proved optimal" if report.optimal else "not proved optimal"
    begun = f", from a schedule of {library.folder}" if known else ""
    return schedule, f"annealed {report.seconds:.1f} s, {report.moves} moves{begun}, latency {proved}"


def _report(draft: PlanDraft, schedule: Schedule, source: str) -> PlanReport:
    batch, inputs, limits = draft.batch, draft.inputs, draft.generation.limits
    reasons = Reasons(draft.run)
    summary, peaks = _summary(draft, schedule, source), draft.memory.held_by(schedule)
    memory = MemoryPlan.of(draft.memory, peaks, ranks_on_machine(inputs.hardware, draft.world_size))
    capture = graph_capture(draft, memory.keeps_generation)
    generation = price_generation(draft)
    hints = reasons.threshold_hints(generation.threshold_samples, inputs.lengths)
    told = (generation.why, *hints, reasons.instance_limits(limits))
    threshold = ThresholdPlan(generation.threshold_samples, generation.threshold, told)
    moves = weight_moves(draft)
    steps = optimizer_step_seconds(draft.analytic)
    moving, offload = sum(move.seconds for move in moves), draft.memory.offload
    seen = offload.seen_seconds(moving, summary.makespan_seconds) if offload else 0.0
    predicted = IterationSeconds(
        moving + seen,
        generation.serial,
        generation.fused,
        batch.optimizer_steps * (minibatch_seconds(draft, summary.serial_makespan_seconds) + steps),
        batch.optimizer_steps * (minibatch_seconds(draft, summary.makespan_seconds) + steps),
        generation.generation_serial,
        generation.generation_fused,
        capture.seconds if capture and capture.each_iteration else 0.0,
    )
    return PlanReport(
        ranks=PlannedRanks(draft.world_size, inputs.hardware.name, draft.run.config.trainer.dtype),
        tasks=draft.tasks,
        batch=batch,
        memory=memory,
        weight_moves=moves,
        seconds=predicted,
        schedule=summary,
        efficiency=efficiency(draft, predicted.training_fused),
        threshold=threshold,
        generation=GenerationPlan(limits, move_cost(draft.costs, limits), capture),
        files=reasons.output_files(),
        reasons=(
            *reasons.choices(batch, draft.generation.cache),
            *reasons.learning_rates(),
            reasons.ends(),
            f"{inputs.lengths.told}; times are means of {len(inputs.drawn.batches)} batches drawn from them",
            reasons.source_of_costs(inputs.hardware, draft.costs, draft.costs_name),
            *inputs.cores.lines(draft.world_size),
            *reasons.reward_calls(draft.costs),
            draft.training.split.why,
            of_memory(memory, draft.memory.communicators),
            *of_keeping(draft.memory, peaks),
            *reasons.offload(draft.memory, seen),
            *((str(capture),) if capture else ()),
            *reasons.early_loading(draft.memory, draft.costs),
        ),
    )


def _summary(draft: PlanDraft, schedule: Schedule, source: str) -> ScheduleSummary:
    timeline, serial = evaluate(schedule), serial_makespan(draft.training.split.whole)
    fusion, seed = draft.run.config.fusion, draft.run.config.trainer.seed
    return ScheduleSummary(
        source=source,
        nodes=schedule.problem.nodes,
        makespan_seconds=float(timeline.makespan) * TICK_SECONDS,
        lower_bound_seconds=float(latency_bound(schedule.problem)) * TICK_SECONDS,
        serial_makespan_seconds=float(serial) * TICK_SECONDS,
        serial_idle=idle_share(timeline, serial),
        peak_activation_bytes=float(timeline.peak_memory),
        alternates=fusion.alternates,
        stages=stage_balances(draft.tasks, draft.analytic, draft.costs, draft.longest_microbatch),
        others=other_promises(fusion, seed, schedule.problem, draft.training.split, draft.ranks.shape),
    )
