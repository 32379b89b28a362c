"""Makes the plan of a run from its draft: training schedule, programs, R_t, predicted seconds, and why.

A search within a time limit gives no two ranks the same schedule, so one process makes the plan and sends it as text;
all others parse it onto their own draft. The programs that run are lowered once, from the problem that was searched.
"""

from __future__ import annotations

import json
from dataclasses import replace

from rlhfuse.config.role import Role
from rlhfuse.decisions.weight_moves import layout_moves
from rlhfuse.planning import reasons
from rlhfuse.planning.draft import PlanDraft, element_bytes
from rlhfuse.planning.efficiency import efficiency, optimizer_step_seconds
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.machine import ranks_on_machine
from rlhfuse.planning.run_plan import PlanReport, RunPlan, ScheduleSummary, reduction_on
from rlhfuse.planning.training_orders import other_promises
from rlhfuse.planning.training_problem import TICK_SECONDS
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import serial_makespan
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.simulator.iteration import IterationSeconds, move_cost, simulate_iteration
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, sweep_threshold

DRAWS = 5  # batches drawn from past lengths and averaged


def make_plan(draft: PlanDraft) -> RunPlan:
    """Decide what is left to decide. Raises ScheduleError where the schedule could hang or passes the memory cap."""
    schedule, source = draft.given or _search(draft)
    return _run_plan(draft, schedule, _report(draft, schedule, source))


def parse_plan(draft: PlanDraft, text: str) -> RunPlan:
    """A plan that another rank made and sent with `RunPlan.to_text`; its schedule is verified here too."""
    raw = json.loads(text)
    return _run_plan(draft, Schedule.parse(draft.problem, raw["schedule"]), PlanReport.from_dict(raw["report"]))


def _run_plan(draft: PlanDraft, schedule: Schedule, report: PlanReport) -> RunPlan:
    reduce = reduction_on(draft.hardware.name)
    programs = lower(schedule, draft.ranks, tied=draft.tied, reduce=reduce)
    verify(programs, schedule, draft.ranks, tied=draft.tied, one_queue=reduce == "joint")
    return RunPlan(report, schedule, draft.ranks, programs, draft.costs, draft.costs_name)


def _search(draft: PlanDraft) -> tuple[Schedule, str]:
    """A fused schedule under the draft's memory cap, and how it was found."""
    config = draft.config
    settings = SearchSettings(time_limit=config.fusion.search_seconds, seed=config.trainer.seed, objective="memory")
    schedule, report = search(draft.problem, settings)
    proved = "proved optimal" if report.optimal else "not proved optimal"
    return schedule, f"annealed {report.seconds:.1f} s, {report.moves} moves, latency {proved}"


def _report(draft: PlanDraft, schedule: Schedule, source: str) -> PlanReport:
    config, batch, limits = draft.config, draft.batch, draft.limits
    summary, peaks = _summary(draft, schedule, source), draft.memory.held_by(schedule)
    kept = draft.memory.keeps_generation(peaks)
    memory = draft.memory.with_generation_kept() if kept else draft.memory
    capture = graph_capture(draft, kept)
    batches = (draft.planned_lengths,)
    if draft.lengths is not None:
        batches = draft.planned_lengths.draw(batch.samples, DRAWS, config.trainer.seed)
    threshold_samples, threshold, why = _choose_threshold(draft, batches)
    hints = reasons.threshold_hints(config, threshold_samples, draft.lengths)
    moves = layout_moves(
        draft.tasks, draft.ranks, draft.specs, element_bytes(config), draft.cores.together(draft.hardware)
    )
    steps = optimizer_step_seconds(draft.analytic)
    moving, offload = sum(move.seconds for move in moves), draft.memory.offload
    seen = offload.seen_seconds(moving, summary.makespan_seconds) if offload else 0.0
    predicted = _predict(draft, batches, summary, threshold_samples, threshold, moving + seen, steps)
    if capture and capture.each_iteration:
        predicted = replace(predicted, capture=capture.seconds)
    return PlanReport(
        world_size=draft.world_size,
        hardware=draft.hardware.name,
        dtype=config.trainer.dtype,
        tasks=draft.tasks,
        batch=batch,
        memory=memory.phases(peaks),
        memory_limit=memory.limit,
        memory_limit_source=memory.limit_source,
        microbatch_tokens=memory.microbatch_tokens,
        process_bytes=draft.memory.process,
        ranks_per_node=ranks_on_machine(draft.hardware, draft.world_size),
        weight_moves=moves,
        seconds=predicted,
        schedule=summary,
        threshold_samples=threshold_samples,
        threshold=threshold,
        limits=limits,
        move_cost=move_cost(draft.costs, limits),
        files=reasons.output_files(config, draft.specs, element_bytes(config)),
        threshold_reasons=(why, *hints, reasons.of_limits(config, limits)),
        reasons=(
            *reasons.of_choices(draft.asked, config, draft.specs, batch),
            reasons.of_ends(config, draft.specs[Role.ACTOR]),
            reasons.of_lengths(config, draft.lengths, DRAWS),
            reasons.of_costs(config, draft.hardware, draft.costs, draft.costs_name),
            *draft.cores.lines(draft.world_size),
            *reasons.of_reward(config, draft.costs),
            draft.split.why,
            reasons.of_memory(memory, peaks),
            *reasons.of_keeping(draft.memory, peaks),
            *reasons.of_offload(config, draft.memory, seen),
            *((str(capture),) if capture else ()),
            *reasons.of_early_loading(config, draft.memory, draft.costs),
        ),
        keeps_generation=kept,
        capture=capture,
        stages=draft.stages,
        efficiency=efficiency(draft, schedule.problem, predicted.training_fused),
        offload=offload,
    )


def _summary(draft: PlanDraft, schedule: Schedule, source: str) -> ScheduleSummary:
    timeline = evaluate(schedule)
    return ScheduleSummary(
        source=source,
        nodes=schedule.problem.nodes,
        makespan_seconds=float(timeline.makespan) * TICK_SECONDS,
        lower_bound_seconds=float(latency_bound(schedule.problem)) * TICK_SECONDS,
        serial_makespan_seconds=float(serial_makespan(draft.split.whole)) * TICK_SECONDS,
        peak_activation_bytes=float(timeline.peak_memory),
        alternates=draft.config.fusion.alternates,
        others=other_promises(draft.config, schedule.problem, draft.split, draft.ranks.shape),
    )


def _choose_threshold(draft: PlanDraft, batches: tuple[SampleLengths, ...]) -> tuple[int | None, Threshold | None, str]:
    """R_t, its curve if there is one, and the sentence that says why."""
    config, instances = draft.config, draft.batch.instances
    if not config.fusion.inter_stage:
        return 0, None, "R_t = 0: fusion.inter_stage is false"
    if instances == 1:
        return 0, None, "R_t = 0: with one generation instance none can be freed"
    if config.threshold() is not None:
        return config.threshold(), None, f"R_t = {config.threshold()}: fusion.threshold says so"
    if threshold := draft.threshold_file:
        return threshold.threshold, threshold, f"{config.fusion.threshold_file}: {threshold.explain()}"
    if draft.lengths is not None:
        least = config.fusion.least_threshold
        threshold = sweep_threshold(batches, instances, draft.costs, draft.limits, least=least)
        return threshold.threshold, threshold, threshold.explain()
    return None, None, "R_t is chosen by simulation once the first iteration has shown its lengths"


def _predict(
    draft: PlanDraft,
    batches: tuple[SampleLengths, ...],
    summary: ScheduleSummary,
    threshold_samples: int | None,
    threshold: Threshold | None,
    moves: float,
    steps: float,
) -> IterationSeconds:
    """Means over the batches; `moves`: seconds of the weights' moves, `steps`: of a mini-batch's optimizer steps."""
    makespans, count = (summary.serial_makespan_seconds, summary.makespan_seconds), draft.batch.optimizer_steps
    least = float(draft.cores.least_time(draft.problem, draft.ranks)) * TICK_SECONDS
    minibatch = max(makespans[0], least) + steps, max(makespans[1], least) + steps
    if threshold is not None and draft.lengths is None:  # read from a file: its curve is all there is
        generation = {point.threshold: point.generation_seconds for point in threshold.sweep}
        training = (seconds * count for seconds in minibatch)
        generated = (generation.get(samples) for samples in (0, threshold.threshold))
        return IterationSeconds(moves, threshold.serial_seconds, threshold.fused_seconds, *training, *generated)
    setting = draft.batch.instances, draft.costs, draft.limits, threshold_samples or 0, minibatch, count, moves
    runs = [vars(simulate_iteration(lengths, *setting)) for lengths in batches]
    return IterationSeconds(**{name: sum(run[name] for run in runs) / len(runs) for name in runs[0]})
