"""A candidate for the plan of a job: one assignment of layouts, with its memory, scheduling problems and costs.

Layouts and batch are checked, the files that the configuration names are read, work is priced, and the one training
problem is stated: times of the profile where there is one, at the lengths that are known; activations at the longest
samples; as cap what a rank has beside them. Paper section 6, parallel strategy configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import FusionConfig, RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.machine import SharedCores
from rlhfuse.costs.paced import PacedCost, load_paced_cost
from rlhfuse.costs.profile_files import load_costs, run_costs
from rlhfuse.costs.table import CostFile, CostTable
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.decisions.layouts import training_layouts
from rlhfuse.planning.job import Job
from rlhfuse.planning.memory.instance_cache import InstanceCache
from rlhfuse.planning.memory.memory_budget import MemoryBudget, check_host_memory, memory_budget
from rlhfuse.planning.planned_lengths import PlannedLengths
from rlhfuse.planning.rooflines import Rooflines
from rlhfuse.planning.training.drawn_batches import DrawnBatches
from rlhfuse.planning.training.split_choice import SplitChoice, choose_split
from rlhfuse.planning.training.stage_cuts import with_cuts
from rlhfuse.planning.training.training_orders import given_schedules
from rlhfuse.planning.training.training_problem import TrainingWork, longest_microbatch
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.simulation import priced_limits
from rlhfuse.simulator.threshold import Threshold, load_threshold
from rlhfuse.tasks.instance_limits import InstanceLimits
from rlhfuse.tasks.placement import instances_per_worker
from rlhfuse.tasks.role import POLICY
from rlhfuse.tasks.task import ModelTask


@dataclass(frozen=True)
class CandidateInputs:
    """What the drafts of a run share whatever its layouts are.

    `drawn`: batches of `lengths`, for which all seconds are. `measured`: what fusion.profile or trainer.pace holds,
    None without; `paced`: the latter alone.
    """

    hardware: HardwareSpec
    cores: SharedCores
    lengths: PlannedLengths
    drawn: DrawnBatches
    measured: CostFile | None
    paced: PacedCost | None = None

    @staticmethod
    def of(run: Job, lengths: SampleLengths | None = None) -> CandidateInputs:
        """`lengths`: in place of those that the configuration names or leaves open.

        Raises InputError for an unknown machine, or naming a file.
        """
        config, world_size = run.config, run.world_size
        try:
            hardware = hardware_by_name(config.trainer.hardware, config.trainer.device, world_size)
        except InputError as error:
            raise InputError(f"trainer.hardware: {error}") from None
        limit, has = config.trainer.memory_limit_gb, hardware.memory_bytes / 1e9
        if hardware.device.own_memory and limit > has:
            raise InputError(f"trainer.memory_limit_gb={limit:g}: one {hardware.name} has {has:.4g}; set no more")
        longest, samples = config.longest_sample, config.samples_per_iteration
        planned = PlannedLengths.of(config.parallel.lengths, longest, config.algorithm.skips)
        if lengths:
            planned = PlannedLengths.seen(lengths, longest, "past runs")
        minibatches, seed = int(config.algorithm.minibatches), config.trainer.seed
        begun = planned.begun if config.algorithm.filter_groups.enable else 1.0
        drawn = DrawnBatches.of(planned.samples, samples, minibatches, seed, planned.trained, begun)
        measured = load_costs(config.fusion.profile) if config.fusion.profile else None
        if measured and world_size > hardware.devices_per_node:  # its first and last instance were on two machines
            link = min(hardware.cross_link_bandwidth, measured.link_bandwidth())
            hardware = replace(hardware, cross_link_bandwidth=link)
        cores, paced = SharedCores.of(config.trainer.threads_per_rank, hardware, world_size, run.host), None
        if config.trainer.pace:
            token_bytes = run.specs[POLICY].kv_bytes_per_token(config.trainer.element_bytes)
            measured = paced = load_paced_cost(config.trainer.pace).of_run(config.trainer.pace_stretch, token_bytes)
            cores = SharedCores()  # what sleeps takes none
        return CandidateInputs(hardware, cores, planned, drawn, measured, paced)


@dataclass(frozen=True)
class GenerationDraft:
    """Generation on an instance: its cache, what it can hold, and R_t with its curve where a file gives them."""

    cache: InstanceCache
    limits: InstanceLimits
    threshold_file: Threshold | None


@dataclass(frozen=True)
class TrainingDraft:
    """Training of mini-batches, by their micro-batches per actor pipeline (M1): what part of them has so many, and the
    problem of their schedule. Which backwards are in two parts; schedules that are not to be searched, and where these
    are from."""

    shares: Mapping[int, float]
    problems: Mapping[int, FusionProblem]
    split: SplitChoice
    given: tuple[Mapping[int, Schedule], str] | None

    @property
    def likeliest(self) -> int:
        """M1 of the most mini-batches."""
        return likeliest(self.shares)

    @property
    def problem(self) -> FusionProblem:
        """That of the most mini-batches."""
        return self.problems[self.likeliest]


def likeliest(shares: Mapping[int, float]) -> int:
    return max(shares, key=lambda rung: (shares[rung], rung))


@dataclass(frozen=True)
class Candidate:
    """A job with one assignment of layouts, which fits its ranks. `costs` price generation and inference until the run
    has measured them. `analytic`: rooflines by task."""

    run: Job
    inputs: CandidateInputs
    tasks: tuple[ModelTask, ...]
    batch: BatchArithmetic
    ranks: FusedRanks
    analytic: Mapping[str, AnalyticCost]
    costs: CostTable
    memory: MemoryBudget
    generation: GenerationDraft
    training: TrainingDraft
    work: TrainingWork

    @cached_property
    def config(self) -> RunConfig:
        """What ranks run: as the run is settled, with the blocks that memory leaves to its cache."""
        cache = self.generation.cache
        return self.run.config.with_(rollout={"kv_blocks_per_instance": cache.given or cache.left})

    @property
    def costs_name(self) -> str:
        profile, pace = self.run.config.fusion.profile, self.run.config.trainer.pace
        if pace:
            return f"costs of trainer.pace={pace}"
        return f"costs of fusion.profile={profile}" if profile else "analytic costs"

    @property
    def paced(self) -> str:
        """In a paced run whose costs its work lasts for, else ''."""
        paced, stretch = self.inputs.paced, self.run.config.trainer.pace_stretch
        return f"{paced.models}, x{stretch:g}" if paced else ""

    @property
    def host_seconds(self) -> dict[str, tuple[float, ...]]:
        """Seconds of launches by trained model and stage; measured training includes them, so there are none then."""
        trained = (task for task in self.tasks if task.training and self.costs.training is None)
        return {task.role: self.analytic[task.name].host_seconds for task in trained}

    @property
    def step_seconds(self) -> float:
        """Seconds of a mini-batch's optimizer steps: all models that train, one after the other."""
        trained = [(task.role, self.analytic[task.name]) for task in self.tasks if task.training]
        return sum(self.costs.steps.get(role, cost.optimizer_step_seconds()) for role, cost in trained)

    def stated(self, rung: int, split: frozenset[str]) -> FusionProblem:
        """The problem of a mini-batch by M1 and the models whose backwards are split."""
        return _stated(self.run.config.fusion, self.memory, self.work, rung, split)

    @cached_property
    def problems(self) -> Mapping[int, FusionProblem]:
        """Problems of all mini-batches that there may be, drawn or not, by M1."""
        known, split = self.training.problems, self.training.split.models
        return {rung: known.get(rung) or self.stated(rung, split) for rung in self.batch.cut.rungs}


def draft_plan(run: Job, lengths: SampleLengths | None = None, inputs: CandidateInputs | None = None) -> Candidate:
    """Check and price a run; searches nothing. Raises InputError: an equation, a file, a phase that does not fit.

    `lengths`: in place of those of the configuration; `inputs`: of them, where several drafts share them.
    """
    config, tasks = run.config, run.rules.table()
    batch = run.rules.batch(tasks)
    inputs = inputs or CandidateInputs.of(run, lengths)
    rooflines = Rooflines.of(run, inputs.hardware, inputs.cores)
    analytic = rooflines.costs(tasks)
    if inputs.measured is None:
        costs = rooflines.table(analytic, run.world_size, inputs.lengths.samples)
    else:
        costs = run_costs(inputs.measured, config.trainer, tasks, run.specs, config.fusion.profile)
    longest = longest_microbatch(config.longest_sample, batch)
    tasks = with_cuts(config.parallel.stage_layers, tasks, analytic, costs, longest)
    analytic = rooflines.costs(tasks)
    ranks = rank_map(training_layouts(tasks), config.fusion.alternates)
    cache, limits, memory = _sizes(run, inputs, batch, ranks, analytic, costs, instances_per_worker(tasks))

    work = TrainingWork(analytic, costs, batch, inputs.drawn, longest, config.fusion.alternates)
    state, shares = partial(_stated, config.fusion, memory, work), inputs.drawn.rungs(batch.cut)
    trained = [costs.stage_seconds(task.role, analytic[task.name], longest) for task in tasks if task.training]
    stated = partial(state, likeliest(shares))
    split = choose_split(config.fusion, all(seconds.split for seconds in trained), stated)
    problems = {rung: state(rung, split.models) for rung in shares}
    given = given_schedules(config.fusion, problems, ranks.shape)
    least = min_memory(problems[likeliest(shares)])
    peaks = memory.most_held(*given[0].values()) if given else least
    memory.check(peaks, least, given[1] if given else "")
    generation = GenerationDraft(cache, limits, _threshold_file(config.fusion.threshold_file, batch))
    training = TrainingDraft(shares, problems, split, given)
    return Candidate(run, inputs, tasks, batch, ranks, analytic, costs, memory, generation, training, work)


def _stated(
    fusion: FusionConfig, memory: MemoryBudget, work: TrainingWork, rung: int, split: frozenset[str]
) -> FusionProblem:
    """The problem of a mini-batch by M1 and the models whose backwards are split, held to the memory of a rank."""
    made, cap, held = work.problem(rung, split), memory.limit, memory.training_bytes
    if not (fusion.by_rule or fusion.schedule):  # one is searched, into the headroom only if the leanest needs it
        least = max(map(sum, zip(held, min_memory(made))))
        cap = max(memory.cap, min(least, memory.limit))
    return replace(made, memory_cap=cap, static_memory=held)


def _sizes(
    run: Job,
    inputs: CandidateInputs,
    batch: BatchArithmetic,
    ranks: FusedRanks,
    analytic: Mapping[str, AnalyticCost],
    costs: CostTable,
    spanned: int,
) -> tuple[InstanceCache, InstanceLimits, MemoryBudget]:
    """A cache as large as memory allows, beside the optimizer on the device where that leaves enough free, and models
    that are loaded early in what is left. Raises InputError for host memory that is short."""
    config, offloading = run.config, run.config.trainer.offload_optimizer

    def sized(offload: bool) -> tuple[InstanceCache, InstanceLimits, MemoryBudget]:
        cache = InstanceCache.of(config, batch.instances)
        while True:
            limits = instance_limits(run, cache, costs, inputs.lengths.samples, spanned)
            memory = memory_budget(run, analytic, ranks, limits.kv_capacity_bytes, batch)
            memory = memory.with_optimizer_offloaded() if offload else memory
            generation = next(phase for phase in memory.static if phase.phase == "generation")
            if (smaller := cache.fitting(generation.kv, memory.needed(generation) - memory.cap)) is None:
                return cache, limits, memory
            cache = smaller

    cache, limits, memory = sized(offload=offloading == "true")
    if offloading == "auto" and inputs.hardware.device.own_memory and not memory.fits_beside_training():
        cache, limits, memory = sized(offload=True)
    scorers = [analytic[f"{role}_inference"].memory.weights_bytes() for role in config.scorers()]
    memory = memory.with_early_loading(scorers)
    check_host_memory(run, memory)
    return cache, replace(limits, early_models=len(memory.early)), memory


def instance_limits(
    run: Job, cache: InstanceCache, costs: CostTable, lengths: SampleLengths, spanned: int
) -> InstanceLimits:
    """Sizes of a generation instance, for samples of these lengths; a worker spans so many instances."""
    config, rollout = run.config, run.config.rollout
    token_bytes = run.specs[POLICY].kv_bytes_per_token(config.trainer.element_bytes)
    most = rollout.max_sequences_per_instance
    limits = InstanceLimits(
        max_sequences=most,
        kv_capacity_bytes=cache.blocks * cache.block_tokens * token_bytes,
        kv_bytes_per_token=token_bytes,
        block_tokens=cache.block_tokens,
        bs_max=config.fusion.bs_max or most,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_output_tokens=rollout.max_response_tokens,
        score_tokens=rollout.max_batched_tokens,
        scoring_models=max(1, len(config.scorers())),
        instances_per_worker=spanned,
        reward_workers=config.reward.workers if config.reward.function else 0,
    )
    return priced_limits(config.fusion.bs_max, limits, costs, lengths)


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
