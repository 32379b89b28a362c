"""The draft of a plan: all that follows from configuration, models and world size, the same on every rank.

Layouts and batch are checked, the files that the configuration names are read, work is priced, and the one training
problem is stated: times of the profile where there is one, at the lengths that are known; activations at the longest
samples; as cap what a rank has beside them. Paper section 6, parallel strategy configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel, MicrobatchTokens
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.job_cost import JobCost, largest_flat_batch
from rlhfuse.costs.kernels import Kernels
from rlhfuse.costs.machine import SharedCores
from rlhfuse.costs.measured import Work
from rlhfuse.costs.profile_files import TensorProfiles, load_costs, run_costs
from rlhfuse.decisions.layouts import (
    TASK_ROLES,
    BatchArithmetic,
    Task,
    batch_arithmetic,
    check_layouts,
    training_layouts,
)
from rlhfuse.planning.memory import SCORERS, MemoryBudget, check_host_memory, memory_budget
from rlhfuse.planning.planned_lengths import PlannedLengths
from rlhfuse.planning.settled_run import SettledRun
from rlhfuse.planning.training.drawn_batches import DrawnBatches
from rlhfuse.planning.training.split_choice import SplitChoice, choose_split
from rlhfuse.planning.training.stage_cuts import StageBalance, stage_balances, with_cuts
from rlhfuse.planning.training.training_orders import given_schedule
from rlhfuse.planning.training.training_problem import longest_microbatch, training_problem
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.simulator.instance_limits import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.threshold import Threshold, load_threshold

CACHE_PARTS = 16  # a cache that memory limits has a whole number of these, so that few sizes are to be simulated
SPARE_BLOCKS = 1  # of a cache on a GPU, for rows of padding


@dataclass(frozen=True)
class DraftInputs:
    """What the drafts of a run share whatever its layouts are.

    `drawn`: batches of `lengths`, for which all seconds are. `measured`: what fusion.profile holds, None without.
    """

    hardware: HardwareSpec
    cores: SharedCores
    lengths: PlannedLengths
    drawn: DrawnBatches
    measured: CostModel | TensorProfiles | None

    @staticmethod
    def of(run: SettledRun, lengths: SampleLengths | None = None) -> DraftInputs:
        """`lengths`: in place of those that the configuration names or leaves open.

        Raises InputError for an unknown machine, or naming a file.
        """
        config, world_size = run.config, run.world_size
        try:
            hardware = hardware_by_name(config.trainer.hardware, config.trainer.device, world_size)
        except InputError as error:
            raise InputError(f"trainer.hardware: {error}") from None
        longest, samples = config.longest_sample, config.samples_per_iteration
        planned = PlannedLengths.of(config.parallel.lengths, longest)
        if lengths:
            planned = PlannedLengths.seen(lengths, longest, "past runs")
        drawn = DrawnBatches.of(planned.samples, samples, int(config.algorithm.minibatches), config.trainer.seed)
        measured = load_costs(config.fusion.profile) if config.fusion.profile else None
        cores = SharedCores.of(config, hardware, world_size, run.host)
        return DraftInputs(hardware, cores, planned, drawn, measured)


@dataclass(frozen=True)
class PlanDraft:
    """A run that can be planned and fits its ranks. `costs` price generation and inference until it has measured them.

    `config` is the run's, with the cache that memory leaves. `lengths` and `drawn`: see DraftInputs. `given`: the
    training schedule with where it is from, unless it is to be searched.
    """

    run: SettledRun
    config: RunConfig
    lengths: PlannedLengths
    drawn: DrawnBatches
    tasks: tuple[Task, ...]
    batch: BatchArithmetic
    ranks: FusedRanks
    hardware: HardwareSpec
    analytic: Mapping[str, AnalyticCost]  # by task
    stages: tuple[StageBalance, ...]
    costs: CostModel
    costs_name: str
    limits: InstanceLimits
    memory: MemoryBudget
    problem: FusionProblem
    split: SplitChoice
    given: tuple[Schedule, str] | None
    threshold_file: Threshold | None
    cores: SharedCores

    @property
    def specs(self) -> Mapping[Role, ModelSpec]:
        return self.run.specs

    @property
    def world_size(self) -> int:
        return self.run.world_size

    @property
    def longest_microbatch(self) -> MicrobatchTokens:
        return longest_microbatch(self.config.longest_sample, self.batch.samples_per_microbatch)

    @property
    def tied(self) -> frozenset[str]:
        """Trained models whose output layer is their embedding; the critic has a head of its own."""
        return frozenset({Role.ACTOR} if self.specs[Role.ACTOR].tied_embeddings else ())


def draft_plan(run: SettledRun, lengths: SampleLengths | None = None, inputs: DraftInputs | None = None) -> PlanDraft:
    """Check and price a run; searches nothing. Raises InputError: an equation, a file, a phase that does not fit.

    `lengths`: in place of those of the configuration; `inputs`: of them, where several drafts share them.
    """
    config, specs, world_size = run.config, run.specs, run.world_size
    tasks = check_layouts(config, specs, world_size)
    batch = batch_arithmetic(config, tasks)
    inputs = inputs or DraftInputs.of(run, lengths)
    hardware, cores, planned, drawn = inputs.hardware, inputs.cores, inputs.lengths.samples, inputs.drawn
    analytic = task_costs(config, specs, tasks, hardware, cores)
    longest = longest_microbatch(config.longest_sample, batch.samples_per_microbatch)
    if inputs.measured is not None:
        costs, costs_name = (
            run_costs(inputs.measured, config, specs),
            f"costs of fusion.profile={config.fusion.profile}",
        )
    else:
        costs, costs_name = _job_cost(analytic, world_size, planned, cores), "analytic costs"
    tasks = with_cuts(config.parallel.stage_layers, tasks, analytic, costs, longest)
    analytic = task_costs(config, specs, tasks, hardware, cores)
    ranks = rank_map(training_layouts(tasks), config.fusion.alternates)
    samples, offloading = batch.samples_per_microbatch, config.trainer.offload_optimizer
    headroom = config.parallel.headroom if offloading == "auto" else 0.0

    def sized(offload: bool) -> tuple[RunConfig, InstanceLimits, MemoryBudget]:
        """A cache as large as memory allows, with the optimizer on the host or on the device outside training."""
        made = config
        while True:
            limits = instance_limits(made, specs[Role.ACTOR], batch.instances, costs, planned.median_context)
            memory = memory_budget(made, analytic, ranks, limits.kv_capacity_bytes, samples, run.host)
            memory = memory.with_optimizer_offloaded(headroom) if offload else memory
            if (fewer := fitting_blocks(made, memory, batch.instances)) is None:
                return made, limits, memory
            made = made.with_(rollout={"kv_blocks_per_instance": fewer})

    sizes = sized(offload=offloading == "true")
    if offloading == "auto" and hardware.device.own_memory and not sizes[-1].fits_beside_training(headroom):
        sizes = sized(offload=True)
    config, limits, memory = sizes
    memory = memory.with_early_loading(
        [analytic[f"{role}_inference"].memory.weights_bytes() for role in config.scorers()]
    )
    limits = replace(limits, early_models=len(memory.early))
    check_host_memory(config, memory, world_size, run.host)

    def stated(split: frozenset[str]) -> FusionProblem:
        made = training_problem(analytic, batch, drawn, longest, costs, config.fusion.alternates, split)
        return replace(made, memory_cap=memory.limit, static_memory=memory.training_bytes)

    trained = [costs.training_cost(task.role, analytic[task.name]) for task in tasks if task.training]
    split = choose_split(config.fusion, config.trainer.transformer_impl, trained, stated)
    problem = stated(split.models) if split.models else split.whole
    given = given_schedule(config.fusion, problem, ranks.shape)
    least = min_memory(problem)
    memory.check(evaluate(given[0]).node_peak_memory if given else least, least, given[1] if given else "")
    return PlanDraft(
        run,
        config,
        inputs.lengths,
        drawn,
        tasks,
        batch,
        ranks,
        hardware,
        analytic,
        stage_balances(tasks, analytic, costs, longest),
        costs,
        costs_name,
        limits,
        memory,
        problem,
        split,
        given,
        _threshold_file(config.fusion.threshold_file, batch),
        cores,
    )


def generation_cost(run: SettledRun, instances: int, hardware: HardwareSpec, cores: SharedCores) -> JobCost:
    """The analytic CostModel of `instances` generation instances, whatever the world of the other tasks."""
    config, specs = run.config, run.specs
    scored = [task for task in SCORERS if dict(TASK_ROLES)[task] in config.roles()]
    layouts = {name: ParallelLayout.parse(getattr(config.parallel, name)) for name in ("generation", *scored)}
    world_size = instances * layouts["generation"].tp
    tasks = [Task(name, dict(TASK_ROLES)[name], layout, (0, world_size - 1)) for name, layout in layouts.items()]
    longest = SampleLengths((config.data.max_prompt_tokens,), (config.rollout.max_response_tokens,))
    return _job_cost(task_costs(config, specs, tasks, hardware, cores), world_size, longest, cores)


def kv_blocks(config: RunConfig, instances: int) -> int:
    """KV blocks of one instance: as configured, else room for every sample of the instance at full length.

    Held-out samples wait for room where they are more, but one of them must find it.
    """
    samples, response = -(-config.samples_per_iteration // instances), config.rollout.max_response_tokens
    wanted = max(samples * _blocks_of(config, response), _blocks_of(config, config.longest_response_tokens))
    return config.rollout.kv_blocks_per_instance or wanted


def fitting_blocks(config: RunConfig, memory: MemoryBudget, instances: int) -> int | None:
    """KV blocks of one instance that memory leaves in generation, where it has no room for all of `kv_blocks`.

    None where it has, where the configuration says how many, and where not even the longest sample would find room.
    Samples beyond the blocks wait, or are preempted and run again.
    """
    generation = next(phase for phase in memory.static if phase.phase == "generation")
    missing = memory.needed(generation) - memory.limit
    if config.rollout.kv_blocks_per_instance or missing <= 0:
        return None
    block_bytes = generation.kv / kv_blocks(config, instances)  # on one rank
    left = int((generation.kv - missing) // block_bytes) - SPARE_BLOCKS
    least, part = _blocks_of(config, config.longest_response_tokens), kv_blocks(config, instances) / CACHE_PARTS
    even = int(left // part * part)
    return even if even >= least else left if left >= least else None


def _blocks_of(config: RunConfig, response_tokens: int) -> int:
    """KV blocks of one sample of that length."""
    return -(-(config.data.max_prompt_tokens + response_tokens) // config.rollout.block_tokens)


def instance_limits(
    config: RunConfig, actor: ModelSpec, instances: int, costs: CostModel, median_context_tokens: float
) -> InstanceLimits:
    """Sizes of a generation instance."""
    rollout = config.rollout
    token_bytes = actor.kv_bytes_per_token(config.trainer.element_bytes)
    most = rollout.max_sequences_per_instance
    limits = InstanceLimits(
        max_sequences=most,
        kv_capacity_bytes=kv_blocks(config, instances) * rollout.block_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        block_tokens=rollout.block_tokens,
        bs_max=config.fusion.bs_max or most,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_output_tokens=rollout.max_response_tokens,
        score_tokens=rollout.max_batched_tokens,
        scoring_models=max(1, len(config.scorers())),
        reward_workers=config.reward.workers if config.reward.function else 0,
    )
    return priced_limits(config.fusion.bs_max, limits, costs, median_context_tokens)


def priced_limits(given: int, limits: InstanceLimits, costs: CostModel, median_context_tokens: float) -> InstanceLimits:
    """`limits` with the BS_max that these costs allow at that context, unless one is `given` (fusion.bs_max)."""
    if given:
        return limits
    return replace(limits, bs_max=largest_flat_batch(costs, median_context_tokens, limits.max_sequences))


def task_costs(
    config: RunConfig,
    specs: Mapping[Role, ModelSpec],
    tasks: Sequence[Task],
    hardware: HardwareSpec,
    cores: SharedCores,
    recompute: str = "",
    sequence_parallel: bool | None = None,
) -> dict[str, AnalyticCost]:
    """One roofline per task. `recompute` and `sequence_parallel`: in place of what `config` says."""
    cuts = config.parallel.sequence_parallel if sequence_parallel is None else sequence_parallel
    again = (recompute or config.trainer.recompute) == "full"
    return {
        task.name: AnalyticCost(
            specs[task.role],
            task.layout,
            cores.rates(hardware, _work_of(task)),
            config.trainer.element_bytes,
            task.role.scalar_head,
            sequence_parallel=task.training and cuts,
            recompute=task.training and again,
            kernels=Kernels.on(hardware, switch_sums=config.rollout.all_reduce != "nccl"),
        )
        for task in tasks
    }


def _work_of(task: Task) -> Work:
    return "training" if task.training else "generation" if task.name == "generation" else "inference"


def _job_cost(
    costs: Mapping[str, AnalyticCost], world_size: int, lengths: SampleLengths, cores: SharedCores
) -> JobCost:
    """The analytic CostModel of generation and inference."""
    generation = costs["generation"]
    crosses = world_size > generation.hardware.devices_per_node
    scorers = tuple(costs[name] for name in SCORERS if name in costs)
    responses = sum(lengths.output) / (sum(lengths.prompt) + sum(lengths.output))
    return JobCost(generation, scorers, crosses, responses, cores.ratios.reward)


def _threshold_file(file: str, batch: BatchArithmetic) -> Threshold | None:
    """The threshold of fusion.threshold_file. Raises InputError for one that was made for another batch."""
    if not file:
        return None
    threshold = load_threshold(file)
    if threshold.instances != batch.instances:
        raise InputError(
            f"fusion.threshold_file={file}: made for {threshold.instances} generation instances, this run has "
            f"{batch.instances}; calibrate again"
        )
    if threshold.threshold > batch.samples or threshold.samples not in (None, batch.samples):
        raise InputError(
            f"fusion.threshold_file={file}: R_t = {threshold.threshold} of {threshold.samples or 'unknown'} samples, "
            f"this run has {batch.samples}; calibrate again"
        )
    return threshold
