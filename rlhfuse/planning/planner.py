"""The making of a run's plan: everything decided before it starts.

    config + model specs + world size -> task table, batch arithmetic, costs -> fused schedule, R_t -> Plan

Nothing is launched and nothing here is random: the same inputs give the same plan on every rank, except for a
schedule searched within a time limit, which one process makes and the others receive.

Knows nothing of torch, process groups or the engine. Paper section 6, parallel strategy configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec, ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost, CostModel, JobCost, largest_flat_batch
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.profiled import ProfiledCost, load_run_costs
from rlhfuse.decisions.layout_moves import layout_moves
from rlhfuse.decisions.layouts import TASK_ROLES, BatchArithmetic, Task, batch_arithmetic, check_layouts
from rlhfuse.errors import InputError
from rlhfuse.planning.memory import SCORERS, TRAINED
from rlhfuse.planning.memory_check import longest_microbatch, memory_limit, memory_limit_source, run_memory
from rlhfuse.planning.output_files import output_files
from rlhfuse.planning.plan import Plan, ScheduleSummary
from rlhfuse.planning.reasons import costs_reason, lengths_reason, limits_reason, memory_reason, threshold_hints
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, fused_problem
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_1f1b, serial_makespan
from rlhfuse.schedule.rules.interleaved import interleaved_1f1b
from rlhfuse.schedule.search.search import SearchSettings, search
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.iteration import IterationSeconds, move_cost, simulate_iteration
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, load_threshold, sweep_threshold

DRAWS = 5  # batches drawn from past lengths and averaged
TICK_SECONDS = 1e-6  # schedules are searched in whole microseconds, so that ties are exact


def read_specs(config: RunConfig) -> dict[str, ModelSpec]:
    """The model spec of each role, from its folder's config.json. Raises InputError naming file and field."""
    return {role: ModelSpec.from_config(getattr(config, role).path) for role in config.roles()}


def element_bytes(config: RunConfig) -> int:
    return 4 if config.trainer.dtype == "float32" else 2


def task_costs(
    config: RunConfig, specs: Mapping[str, ModelSpec], tasks: tuple[Task, ...], hardware: HardwareSpec
) -> dict[str, AnalyticCost]:
    """One roofline per task."""
    size, recompute = element_bytes(config), config.trainer.recompute == "full"
    return {
        task.name: AnalyticCost(
            specs[task.role],
            task.layout,
            hardware,
            size,
            task.role.scalar_head,
            sequence_parallel=task.training and config.parallel.sequence_parallel,
            recompute=task.training and recompute,
        )
        for task in tasks
    }


def job_cost(costs: Mapping[str, AnalyticCost], world_size: int) -> JobCost:
    """The analytic CostModel of generation and inference."""
    generation = costs["generation"]
    crosses = world_size > generation.hardware.devices_per_node
    return JobCost(generation, tuple(costs[name] for name in SCORERS if name in costs), cross_node=crosses)


def starting_costs(
    config: RunConfig, specs: Mapping[str, ModelSpec], analytic: Mapping[str, AnalyticCost], world_size: int
) -> tuple[CostModel, str]:
    """Costs of generation and inference before a run has measured any, and what they are called.

    Those of fusion.profile, else analytic. Raises InputError for a file that is no profile of this run.
    """
    if config.fusion.profile:
        return load_run_costs(config, specs), f"costs of fusion.profile={config.fusion.profile}"
    return job_cost(analytic, world_size), "analytic costs"


def generation_cost(
    config: RunConfig, specs: Mapping[str, ModelSpec], instances: int, hardware: HardwareSpec
) -> JobCost:
    """The CostModel of `instances` generation instances, whatever the world of the other tasks."""
    parallel, size = config.parallel, element_bytes(config)
    roles = dict(TASK_ROLES)
    present = ("generation", *(task for task in SCORERS if roles[task] in config.roles()))
    layouts = {task: ParallelLayout.parse(getattr(parallel, task)) for task in present}
    costs = {
        task: AnalyticCost(specs[roles[task]], layout, hardware, size, roles[task].scalar_head)
        for task, layout in layouts.items()
    }
    return job_cost(costs, instances * layouts["generation"].tp)


def hardware_of(config: RunConfig) -> HardwareSpec:
    """The machine that is planned for. Raises InputError naming the key and the known ones."""
    try:
        return hardware_by_name(config.trainer.hardware, config.trainer.device)
    except InputError as error:
        raise InputError(f"trainer.hardware: {error}") from None


def kv_blocks(config: RunConfig, instances: int) -> int:
    """KV blocks of one instance: as configured, else room for every sample of the instance at full length."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    samples = -(-config.samples_per_iteration // instances)
    return config.rollout.kv_blocks_per_instance or samples * -(-longest // config.rollout.block_tokens)


def instance_limits(
    config: RunConfig, actor: ModelSpec, instances: int, costs: CostModel, median_context_tokens: float
) -> InstanceLimits:
    """What a generation instance holds. BS_max comes from the costs unless the config gives it."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    blocks = kv_blocks(config, instances)
    token_bytes = actor.kv_bytes_per_token(element_bytes(config))
    bs_max = config.fusion.bs_max or largest_flat_batch(
        costs, median_context_tokens, rollout.max_sequences_per_instance
    )
    return InstanceLimits(
        max_sequences=rollout.max_sequences_per_instance,
        kv_capacity_bytes=blocks * rollout.block_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        block_tokens=rollout.block_tokens,
        bs_max=bs_max,
        max_prompt_tokens=prompt,
        max_output_tokens=rollout.max_response_tokens,
        score_tokens=rollout.max_batched_tokens,
        scoring_models=max(1, len(config.scorers())),
    )


def training_problem(
    costs: Mapping[str, AnalyticCost],
    batch: BatchArithmetic,
    tokens_per_sample: float,
    profile: CostModel | None = None,
) -> FusionProblem:
    """The scheduling problem of one mini-batch on one fused group, in ticks of TICK_SECONDS and bytes.

    Times are those of a `profile` where it is a ProfiledCost, else the roofline's; bytes are always the latter's.
    """
    sequences = batch.samples_per_microbatch
    tokens = tokens_per_sample * sequences
    trained = {task.removesuffix("_train"): costs[task] for task in TRAINED if task in costs}
    stage_costs = {
        model: profile.stage_costs(model, cost, tokens, sequences, TICK_SECONDS)
        if isinstance(profile, ProfiledCost)
        else cost.stage_costs(tokens, sequences, TICK_SECONDS)
        for model, cost in trained.items()
    }
    return fused_problem({model: cost.layout for model, cost in trained.items()}, batch.actor_microbatches, stage_costs)


def choose_schedule(config: RunConfig, problem: FusionProblem) -> tuple[Schedule, str]:
    """The training schedule and where it is from: the config's file, (interleaved) serial 1F1B, or a search at start.

    A file's order is taken and priced with this run's times. Raises InputError for a file made for other layouts.
    """
    if not config.fusion.intra_stage:
        if all(len(set(pipeline.placement)) < pipeline.stages for pipeline in problem.pipelines):
            return interleaved_1f1b(problem), "interleaved 1F1B: fusion.intra_stage is false"
        return serial_1f1b(problem), "serial 1F1B: fusion.intra_stage is false"
    if config.fusion.schedule:
        loaded = load_schedule(config.fusion.schedule, expect=problem)
        return Schedule(problem, loaded.orders), f"order read from {config.fusion.schedule}"
    limit, seed = config.fusion.search_seconds, config.trainer.seed
    found, report = search(problem, SearchSettings(time_limit=limit, seed=seed, objective="memory"))
    proved = "proved optimal" if report.optimal else "not proved optimal"
    return found, f"annealed {report.seconds:.1f} s, {report.moves} moves, latency {proved}"


def make_plan(
    config: RunConfig, specs: Mapping[str, ModelSpec], world_size: int, lengths: SampleLengths | None = None
) -> Plan:
    """The plan alone; see `plan_run`."""
    return plan_run(config, specs, world_size, lengths)[0]


def plan_run(
    config: RunConfig, specs: Mapping[str, ModelSpec], world_size: int, lengths: SampleLengths | None = None
) -> tuple[Plan, Schedule]:
    """Check everything and decide everything; the second value is the training schedule. Launches nothing.

    `lengths`: of past samples, for predictions and R_t (batches of the run's size are drawn from them); else every
    sample counts as long as it can become. Raises InputError with the equation or the file that is wrong.
    """
    tasks = check_layouts(config, specs, world_size)
    batch = batch_arithmetic(config, tasks)
    hardware = hardware_of(config)
    costs = task_costs(config, specs, tasks, hardware)
    known = _known_lengths(config, lengths)
    mean_tokens = (sum(known.prompt) + sum(known.output)) / len(known)
    reasons = [lengths_reason(config, lengths, DRAWS)]

    job, priced_by = starting_costs(config, specs, costs, world_size)
    schedule, source = choose_schedule(config, training_problem(costs, batch, mean_tokens, job))
    summary = summarise_schedule(schedule, source)

    if config.fusion.profile:
        training = "training too" if isinstance(job, ProfiledCost) else "training analytically"
        reasons.append(f"generation and inference are priced by {priced_by}, {training}")
    else:
        reasons.append(costs_reason(config, hardware))
    limits = instance_limits(config, specs["actor"], batch.instances, job, median_context(known))
    batches = known.draw(batch.samples, DRAWS, config.trainer.seed) if lengths else (known,)
    setting = _Setting(config, batch, job, limits, batches, lengths is not None)
    threshold_samples, threshold, reason = _choose_threshold(setting)
    threshold_reasons = (reason, *threshold_hints(config, threshold_samples, lengths), limits_reason(config, limits))
    moves = layout_moves(tasks, specs, element_bytes(config), hardware)
    seconds = _predict(setting, summary, threshold_samples, threshold, sum(move.seconds for move in moves))

    full = training_problem(costs, batch, config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    memory = run_memory(config, costs, batch, limits.kv_capacity_bytes, Schedule(full, schedule.orders))
    limit = memory_limit(config, hardware, world_size)
    reasons.append(memory_reason(memory, hardware, limit))
    plan = Plan(
        world_size=world_size,
        hardware=hardware.name,
        dtype=config.trainer.dtype,
        tasks=tasks,
        batch=batch,
        memory=memory,
        memory_limit=limit,
        memory_limit_source=memory_limit_source(config, hardware, world_size),
        microbatch_tokens=longest_microbatch(config, batch),
        process_bytes=hardware.process_bytes,
        ranks_per_node=min(world_size, hardware.devices_per_node),
        weight_moves=moves,
        seconds=seconds,
        schedule=summary,
        threshold_samples=threshold_samples,
        threshold=threshold,
        limits=limits,
        move_cost=move_cost(job, limits),
        files=output_files(config, specs, element_bytes(config)),
        threshold_reasons=threshold_reasons,
        reasons=tuple(reasons),
    )
    return plan, schedule


def summarise_schedule(schedule: Schedule, source: str) -> ScheduleSummary:
    """Price a schedule of a `training_problem`."""
    timeline = evaluate(schedule)
    return ScheduleSummary(
        source=source,
        nodes=schedule.problem.nodes,
        makespan_seconds=float(timeline.makespan) * TICK_SECONDS,
        lower_bound_seconds=float(latency_bound(schedule.problem)) * TICK_SECONDS,
        serial_makespan_seconds=float(serial_makespan(schedule.problem)) * TICK_SECONDS,
        peak_activation_bytes=float(timeline.peak_memory),
    )


def median_context(lengths: SampleLengths) -> float:
    """Context of a median sample halfway through its response."""
    return sorted(lengths.prompt)[len(lengths) // 2] + sorted(lengths.output)[len(lengths) // 2] / 2


@dataclass(frozen=True)
class _Setting:
    """What R_t and the predicted seconds depend on."""

    config: RunConfig
    batch: BatchArithmetic
    job: CostModel
    limits: InstanceLimits
    batches: tuple[SampleLengths, ...]
    lengths_known: bool  # the batches are drawn from real lengths


def _choose_threshold(setting: _Setting) -> tuple[int | None, Threshold | None, str]:
    """R_t, its curve if there is one, and the sentence that says why."""
    config, batch = setting.config, setting.batch
    if not config.fusion.inter_stage:
        return 0, None, "R_t = 0: fusion.inter_stage is false"
    if batch.instances == 1:
        return 0, None, "R_t = 0: with one generation instance none can be freed"
    if config.threshold() is not None:
        return config.threshold(), None, f"R_t = {config.threshold()}: fusion.threshold says so"
    if config.fusion.threshold_file:
        found = load_threshold(config.fusion.threshold_file)
        check_threshold(found, config, batch)
        return found.threshold, found, f"{config.fusion.threshold_file}: {found.explain()}"
    if setting.lengths_known:
        found = sweep_threshold(
            setting.batches,
            batch.instances,
            setting.job,
            setting.limits,
            max_triggers=config.fusion.max_triggers,
            least=config.fusion.least_threshold,
        )
        return found.threshold, found, found.explain()
    return None, None, "R_t is chosen by simulation once the first iteration has shown its lengths"


def check_threshold(found: Threshold, config: RunConfig, batch: BatchArithmetic) -> None:
    file = config.fusion.threshold_file
    if found.instances != batch.instances:
        raise InputError(
            f"fusion.threshold_file={file}: made for {found.instances} generation instances, this run has "
            f"{batch.instances}; calibrate again"
        )
    if found.threshold > batch.samples or found.samples not in (None, batch.samples):
        raise InputError(
            f"fusion.threshold_file={file}: R_t = {found.threshold} of {found.samples or 'unknown'} samples, this run "
            f"has {batch.samples}; calibrate again"
        )


def _predict(
    setting: _Setting,
    summary: ScheduleSummary,
    threshold_samples: int | None,
    threshold: Threshold | None,
    moves: float,
) -> IterationSeconds:
    """Means over the batches; of a threshold made for lengths that are not known here, what its curve says.

    `moves`: seconds of the weights' moves.
    """
    minibatch = (summary.serial_makespan_seconds, summary.makespan_seconds)
    batch, count = setting.batch, setting.batch.optimizer_steps
    if threshold is not None and not setting.lengths_known:  # read from a file: its curve is all there is
        generation = {point.threshold: point.generation_seconds for point in threshold.sweep}
        return IterationSeconds(
            moves,
            threshold.serial_seconds,
            threshold.fused_seconds,
            minibatch[0] * count,
            minibatch[1] * count,
            generation.get(0),
            None if len(threshold.triggers) > 1 else generation.get(threshold.threshold),
        )
    triggers = threshold.triggers if threshold else (threshold_samples,) if threshold_samples else ()
    runs = [
        simulate_iteration(
            one, batch.instances, setting.job, setting.limits, triggers, minibatch, count, moves
        ).to_dict()
        for one in setting.batches
    ]
    return IterationSeconds(**{name: sum(run[name] for run in runs) / len(runs) for name in runs[0]})


def _known_lengths(config: RunConfig, lengths: SampleLengths | None) -> SampleLengths:
    """Past lengths cut to the run's maximum; without any, every sample at that maximum (an upper bound)."""
    prompt, response = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    if lengths is not None:
        return lengths.clip(prompt, response)
    samples = config.samples_per_iteration
    return SampleLengths((prompt,) * samples, (response,) * samples)
