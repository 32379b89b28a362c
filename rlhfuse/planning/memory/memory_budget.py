"""Memory of a rank in each phase of an iteration, in bytes, against what it may have.

The models that train stay in device memory; what the other phases need comes before they begin and goes when they end.
A phase is priced on its fullest rank, all samples as long as they can become. What training holds beside the
activations of its schedule is the static memory of the scheduling problem, whose cap is the limit of a rank
(paper section 5.2, constraint 3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.settings import RolloutConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.machine import communicator_bytes, host_memory, memory_limit, ranks_on_machine
from rlhfuse.costs.model_memory import ModelMemory
from rlhfuse.costs.speculation import guess_bytes
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.planning.job import Job
from rlhfuse.planning.training.passing import PassingMemory
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import OperationGraph, build_graph
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.search.solution import node_peaks, sequence_of
from rlhfuse.tasks.task import BENEATH, SCORERS, TRAINED

TOKEN_BYTES, RESPONSE_BYTES = 16, 36  # of a mini-batch: ids and positions; which row, which id, and five numbers
KEEPING_PART = 0.9  # of the limit, where generation is kept: graphs have a memory pool of their own, two fragment more
SMALL_BYTES = 8 * 512  # of a micro-batch: borders, sums of its loss and whether it is finite, of 512 bytes each
RESTING = ("moves", "generation", "inference")  # phases in which the optimizer may rest on the host
DEVICE_PARTS = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")
REMEDIES = {
    "start": ("stages",),
    "moves": ("generation", "inference", "stages"),
    "generation": ("cache", "generation", "stages"),
    "inference": ("batch", "inference", "stages"),
    "training": ("cut", "recompute", "stages"),
}
WORDS = {
    "stages": "use more stages or tensor ranks for the models that train (parallel=auto searches them)",
    "generation": "use more tensor ranks for parallel.generation",
    "inference": "use more tensor ranks for parallel.inference",
    "cache": "lower rollout.kv_blocks_per_instance",
    "batch": "lower rollout.max_batched_tokens",
    "cut": "lower fusion.microbatch_tokens or raise fusion.actor_microbatches",
    "recompute": "set trainer.recompute=full",
    "limit": "raise trainer.memory_limit_gb",
}


class MemoryRefusal(InputError):
    """A phase needs `missing_bytes` more than a rank may use."""

    def __init__(self, phase: str, missing_bytes: float, message: str) -> None:
        super().__init__(message)
        self.phase, self.missing_bytes = phase, missing_bytes


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes on one rank during one phase; `host` is host memory, all else device memory."""

    phase: str
    weights: int
    optimizer: int
    gradients: int
    activations: int
    kv: int
    buckets: int  # for weights that move; on GPUs what stays for hidden states between ranks, and rotations
    host: int  # offloaded weights, and the optimizer where it rests there; tables for guesses

    @property
    def device(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.kv + self.buckets


@dataclass(frozen=True)
class RankMemory:
    """The phases of a rank on `node` of the schedule, training without its schedule's activations; bytes.

    `places`: where in a pipeline of each model it stands; ranks at the same places need the same.
    """

    places: tuple[int, ...]
    node: int
    static: tuple[PhaseMemory, ...]

    def phases(self, activations: Sequence[float]) -> tuple[PhaseMemory, ...]:
        """With a schedule that holds up to so much on each node."""
        *others, training = self.static
        return (*others, replace(training, activations=training.activations + int(activations[self.node])))


@dataclass(frozen=True)
class GenerationMemory:
    """What generation alone needs, in bytes of every rank."""

    weights: int  # its copy of the actor
    kv: int
    graphs: int  # what recorded decode steps reserve for their activations
    decoding: int  # activations of a step, and the logits of those sequences that draw a token

    @staticmethod
    def of(model: ModelMemory, rollout: RolloutConfig, kv_capacity_bytes: float) -> GenerationMemory:
        """With C of a whole instance."""
        batched = rollout.max_batched_tokens
        drawing = min(rollout.max_sequences_per_instance, batched)
        graphs = model.graph_bytes(drawing) if rollout.cuda_graphs else 0
        kv = int(kv_capacity_bytes / model.layout.tp)
        return GenerationMemory(model.weights_bytes(), kv, graphs, model.prefilling_bytes(batched, drawing))

    @property
    def device(self) -> int:
        """What may stay between iterations."""
        return self.weights + self.kv + self.graphs

    def beside(self, phase: PhaseMemory) -> PhaseMemory:
        """A phase with what it does not hold of it anyway; at the start there is none yet. Graphs come on top."""
        if phase.phase in ("start", "generation"):
            return phase
        moved = phase.phase == "moves"  # into the copy
        return replace(phase, weights=phase.weights + (0 if moved else self.weights), kv=phase.kv + self.kv)


@dataclass(frozen=True)
class OptimizerOffload:
    """Main weights and moments rest on the host from `first_phase` on, until training; of the fullest rank."""

    first_phase: str  # moves, or generation: then they leave while weights are moved
    nbytes: int
    seconds: float  # one way

    def seen_seconds(self, moving: float, minibatch: float) -> float:
        """What is not hidden there and back; `moving`: seconds of the weights' moves, `minibatch`: until a step."""
        there = self.seconds - (moving if self.first_phase != RESTING[0] else 0)
        return max(0.0, there) + max(0.0, self.seconds - minibatch)


@dataclass(frozen=True)
class MemoryBudget:
    """The phases of every kind of rank, in the order of an iteration; on GPUs the start before them. Training is last.

    What a schedule holds is given by node: `activations`.
    """

    ranks: tuple[RankMemory, ...]
    hardware: HardwareSpec
    limit: float  # of one rank
    limit_source: str
    microbatch_tokens: float  # of the longest samples
    generation: GenerationMemory
    offload: OptimizerOffload | None = None  # None: the optimizer stays on the device
    early: tuple[int, ...] = ()  # weights of the first scorers, which are loaded before generation ends
    passing: PassingMemory | None = None  # on GPUs
    communicators: int = 0  # bytes of their buffers on a GPU
    headroom: float = 0.0  # part of the limit
    idle: frozenset[str] = frozenset()  # remedies that cannot help this run

    @property
    def cap(self) -> float:
        """The limit less the headroom, in bytes: a choice of the plan stays within it."""
        return self.limit * (1 - self.headroom)

    @property
    def keeping_cap(self) -> float:
        """The same where generation stays on the device, or scorers are loaded early."""
        return min(KEEPING_PART * self.limit, self.cap)

    @property
    def process(self) -> int:
        """Bytes of a rank that no phase names: its process or CUDA context, and communicators."""
        return self.hardware.process_bytes + self.communicators

    def held_by(self, *schedules: Schedule) -> tuple[float, ...]:
        """Activations of any of the schedules by node, so that with what passes at most they are training's peak."""
        return self.held_in_order(*((graph := build_graph(one.problem), sequence_of(graph, one)) for one in schedules))

    def held_in_order(self, *sequences: tuple[OperationGraph, np.ndarray]) -> tuple[float, ...]:
        """The same of schedules as sequences."""
        held = (self.passing.held_by(*one) if self.passing else node_peaks(*one) for one in sequences)
        return tuple(map(max, zip(*held)))

    def most_held(self, *schedules: Schedule) -> tuple[float, ...]:
        """The same, and no less than the schedules count by themselves."""
        counted = (evaluate(one).node_peak_memory for one in schedules)
        return tuple(map(max, self.held_by(*schedules), *counted))

    def with_generation_kept(self) -> MemoryBudget:
        """Where the actor's copy and the cache never leave the device."""
        return self._with_phases(lambda rank, phase: self.generation.beside(phase))

    def _with_phases(self, change: Callable[[RankMemory, PhaseMemory], PhaseMemory]) -> MemoryBudget:
        ranks = (replace(rank, static=tuple(change(rank, phase) for phase in rank.static)) for rank in self.ranks)
        return replace(self, ranks=tuple(ranks))

    def keeps_generation(self, activations: Sequence[float]) -> bool:
        """Whether they stay: on GPUs, where every phase has room for them, the optimizer and KEEPING_PART's margin."""
        fits = self.keeping_bytes(activations) <= self.keeping_cap
        return fits and self.hardware.device.own_memory and not self.offload

    def keeping_bytes(self, activations: Sequence[float]) -> int:
        """Need of the fullest phase if they stay."""
        kept = self.with_generation_kept()
        return kept.needed(kept.fullest(activations)) + self.generation.graphs

    def phases(self, activations: Sequence[float]) -> tuple[PhaseMemory, ...]:
        """Each on the rank that it fills most."""
        every = zip(*(rank.phases(activations) for rank in self.ranks))
        return tuple(max(phase, key=self.needed) for phase in every)

    @property
    def static(self) -> tuple[PhaseMemory, ...]:
        """Each on the rank that it fills most, training without its schedule's activations."""
        return tuple(max(phase, key=self.needed) for phase in zip(*(rank.static for rank in self.ranks)))

    def of(self, places: tuple[int, ...]) -> RankMemory:
        """Memory of the ranks that stand there."""
        return next(rank for rank in self.ranks if rank.places == places)

    def needed(self, phase: PhaseMemory) -> int:
        """Part of `limit` that a phase takes; on a CPU host copies share it."""
        return phase.device + self.process + (0 if self.hardware.device.own_memory else phase.host)

    def fits_beside_training(self) -> bool:
        """Whether every phase in which the optimizer may rest on the host is within the cap."""
        return all(self.needed(phase) <= self.cap for phase in self.static if phase.phase in RESTING)

    def with_optimizer_offloaded(self) -> MemoryBudget:
        """The optimizer on the host outside training; it leaves before the moves where they do not fit beside it."""
        beside = all(self.needed(phase) <= self.cap for phase in self.static if phase.phase == RESTING[0])
        resting, most = RESTING[beside:], max(rank.static[-1].optimizer for rank in self.ranks)

        def rested(rank: RankMemory, phase: PhaseMemory) -> PhaseMemory:
            if phase.phase == "start":
                return phase
            optimizer = 0 if phase.phase in resting else phase.optimizer
            return replace(phase, host=phase.host + rank.static[-1].optimizer, optimizer=optimizer)

        offload = OptimizerOffload(resting[0], most, most / self.hardware.host_bandwidth)
        return replace(self._with_phases(rested), offload=offload)

    def with_early_loading(self, weights: Sequence[int]) -> MemoryBudget:
        """On GPUs, as many of the scorers' `weights`, in order, as have room beside generation."""
        phases = (phase for phase in self.static if phase.phase == "generation")
        room = self.keeping_cap - self.generation.graphs - max(map(self.needed, phases))
        fitting = sum(total <= room for total in accumulate(weights)) if self.hardware.device.own_memory else 0
        early = tuple(weights[:fitting])

        def loaded(rank: RankMemory, phase: PhaseMemory) -> PhaseMemory:
            return replace(phase, weights=phase.weights + sum(early)) if phase.phase == "generation" else phase

        return replace(self._with_phases(loaded), early=early)

    def fullest(self, activations: Sequence[float]) -> PhaseMemory:
        return max(self.phases(activations), key=self.needed)

    @property
    def training_bytes(self) -> tuple[int, ...]:
        """Training's need beside the activations of its schedule, of each node's fullest rank."""
        held: dict[int, int] = {}
        for rank in self.ranks:
            held[rank.node] = max(held.get(rank.node, 0), self.needed(rank.static[-1]))
        return tuple(held[node] for node in sorted(held))

    def check(self, activations: Sequence[float], least: Sequence[float], order: str) -> None:
        """Raise InputError unless a schedule with `activations`, called `order`, fits; `least`: of the leanest."""
        fullest = self.fullest(activations)
        needed = self.needed(fullest)
        if needed <= self.limit:
            return
        parts = [f"{name} {readable_bytes(getattr(fullest, name))}" for name in DEVICE_PARTS if getattr(fullest, name)]
        if not self.hardware.device.own_memory:
            parts.append(f"host copies {readable_bytes(fullest.host)}")
        if self.process:
            parts.append(f"the process {readable_bytes(self.process)}")
        helpful = [WORDS[one] for one in (*REMEDIES[fullest.phase], "limit") if one not in self.idle]
        which, remedy = "", ", or ".join(helpful)
        may_rest = self.hardware.device.own_memory and not self.offload
        if fullest.phase == "training":
            smallest = max(self.needed(rank.phases(least)[-1]) for rank in self.ranks)
            which = f" with {order}" if smallest < needed else ""
            which += f"; the least of any schedule is {readable_bytes(smallest)}"
            if smallest <= self.limit:
                remedy = f"set fusion.intra_stage=search without fusion.schedule to find one that fits, or {remedy}"
        elif may_rest and self.with_optimizer_offloaded().fits_beside_training():
            remedy = f"set trainer.offload_optimizer=auto, or {remedy}"
        raise MemoryRefusal(
            fullest.phase,
            needed - self.limit,
            f"memory: {fullest.phase} needs {readable_bytes(needed)} per rank ({', '.join(parts)}){which}, but a rank "
            f"of this {self.hardware.name} has {readable_bytes(self.limit)}; {remedy}",
        )


def check_host_memory(run: Job, memory: MemoryBudget) -> None:
    """Raise InputError unless a machine with GPUs has host memory for all copies of its ranks, and their processes."""
    hardware = memory.hardware
    if not hardware.device.own_memory:  # where it is the limit of a rank
        return
    ranks = ranks_on_machine(hardware, run.world_size)
    has, source = host_memory(run.config.trainer, hardware, run.host)
    fullest = max(memory.static, key=lambda phase: phase.host)
    needed = ranks * (fullest.host + hardware.host_process_bytes)
    if needed > has:
        remedy = "set trainer.offload_optimizer=false, " if memory.offload else ""
        remedy += "use more tensor ranks for parallel.inference"
        process = readable_bytes(hardware.host_process_bytes)
        each = f"copies {readable_bytes(fullest.host)} and the process {process} each"
        raise InputError(
            f"host memory: {fullest.phase} needs {readable_bytes(needed)} on a node of {ranks} ranks ({each}), but a "
            f"node has {readable_bytes(has)} ({source}); {remedy}, or set trainer.host_memory_gb"
        )


def memory_budget(
    run: Job,
    costs: Mapping[str, AnalyticCost],
    ranks: FusedRanks,
    kv_capacity_bytes: float,
    batch: BatchArithmetic,
) -> MemoryBudget:
    """The budget of a run; `costs` has one entry per task, `kv_capacity_bytes` is C of a whole instance."""
    hardware, models = costs["generation"].hardware, {task: cost.memory for task, cost in costs.items()}
    needs, trainer = _Needs(run, hardware, models, kv_capacity_bytes, batch), run.config.trainer
    kinds: dict[tuple[int, ...], RankMemory] = {}
    for rank in range(ranks.shape.nodes * ranks.shape.node_ranks):  # every replica has ranks at the same places
        places = tuple(ranks.locate(model, rank)[1] for model in ranks.shape.layouts)
        if places not in kinds:
            kinds[places] = RankMemory(places, ranks.node_of(rank), needs.phases(places))
    limit = memory_limit(trainer, hardware, ranks.size, run.host)
    trained = {task.removesuffix("_train"): models[task] for task in TRAINED if task in models}
    tokens = needs.microbatch_tokens
    passing = PassingMemory.of(trained, tokens) if hardware.device.own_memory else None
    buffers = 0
    if not trainer.share_gpu:  # else what ranks exchange passes through the host
        layouts = {task: model.layout for task, model in models.items()}
        buffers = communicator_bytes(hardware, layouts, ranks, run.tied, run.norms_by_pipeline)
    rest = None, (), passing, buffers, run.config.parallel.headroom, _idle_remedies(run, hardware, models, tokens)
    return MemoryBudget(tuple(kinds.values()), hardware, *limit, tokens, needs.generation, *rest)


def _idle_remedies(
    run: Job, hardware: HardwareSpec, models: Mapping[str, ModelMemory], tokens: float
) -> frozenset[str]:
    """Remedies that cannot help, because the setting that they change is at its limit."""
    config, widest = run.config, min(hardware.devices_per_node, run.world_size)
    cut = {task: model.layout.tp * (model.layout.pp if task in TRAINED else 1) for task, model in models.items()}
    idle = {
        "stages": all(cut[task] == run.world_size for task in TRAINED if task in cut),
        "generation": cut["generation"] == widest,
        "inference": all(cut[task] == widest for task in SCORERS if task in cut),
        "cache": not config.rollout.kv_blocks_per_instance,
        "cut": tokens <= sum(config.longest_sample),
        "recompute": config.trainer.recompute == "full",
        "limit": hardware.device.own_memory and config.trainer.memory_limit_gb * 1e9 in (0, hardware.memory_bytes),
    }
    return frozenset(remedy for remedy, ended in idle.items() if ended)


def input_bytes(batch: BatchArithmetic, longest: tuple[int, int], hardware: HardwareSpec) -> int:
    """What a device holds of a mini-batch's samples while it trains on them, before dp, all as long as the `longest`,
    tokens of a prompt and a response; none where they are in its memory anyway."""
    if not hardware.device.own_memory:
        return 0
    sample = TOKEN_BYTES * sum(longest) + RESPONSE_BYTES * longest[1]
    return int(batch.samples_per_minibatch * sample + batch.most_microbatches * SMALL_BYTES)


class _Needs:
    """Bytes of the phases, rank by rank.

    Generation and scoring keep no activations for a backward: they hold the widest layer's of a batch, and the float32
    logits where there is a head, in generation those of the sequences that draw a token.
    """

    def __init__(
        self,
        run: Job,
        hardware: HardwareSpec,
        models: Mapping[str, ModelMemory],
        kv_capacity_bytes: float,
        batch: BatchArithmetic,
    ) -> None:
        self._starts = hardware.device.own_memory
        rollout, generation, longest = run.config.rollout, models["generation"], run.config.longest_sample
        batched = rollout.max_batched_tokens
        self._trained = [models[task] for task in TRAINED if task in models]
        scorers = [models[task] for task in SCORERS if task in models]
        self._offloaded = sum(model.weights_bytes() for model in scorers)
        written = batch.samples * rollout.max_response_tokens
        self._guesses = guess_bytes(written) if rollout.draft_rows else 0
        moved = [models[task] for task in BENEATH if task in models]
        self._moved = sum(model.weights_bytes() for model in moved)  # of scorers, beneath generation
        self.generation = GenerationMemory.of(generation, rollout, kv_capacity_bytes)
        bucket = run.config.fusion.bucket_mib << 20
        self._buckets, self._beneath = min(bucket, self.generation.weights), min(bucket, self._moved)
        self._scoring = max((model.scoring_bytes(batched) for model in scorers), default=0)
        self.microbatch_tokens = batch.cut.tokens
        self._inputs = input_bytes(batch, longest, hardware)
        self._gathering = max(model.gathering_bytes(self.microbatch_tokens) for model in self._trained)
        models_run = generation, *scorers, *self._trained
        self._rotations = sum(model.rotation_bytes(sum(longest)) for model in models_run)

    def phases(self, places: tuple[int, ...]) -> tuple[PhaseMemory, ...]:
        """Phases of a rank at these places of the pipelines of the models that train."""
        parts = list(zip(self._trained, places))
        resident = sum(model.weights_bytes(place) for model, place in parts)
        optimizer = sum(model.optimizer_bytes(place) for model, place in parts)
        gradients = sum(model.gradient_bytes(place) + model.head_sum_bytes() for model, place in parts)
        standing = int(self._gathering + self._rotations)
        standing += int(sum(model.receiving_bytes(self.microbatch_tokens, place) for model, place in parts))
        inputs = sum(self._inputs // model.layout.dp for model, _ in parts)
        passing = inputs + max(model.passing_bytes(self.microbatch_tokens, place) for model, place in parts)

        def phase(name: str, weights: int = 0, **others: float) -> PhaseMemory:
            held = dict(gradients=0, activations=0, kv=0, buckets=standing) | {
                key: int(value) for key, value in others.items()
            }
            return PhaseMemory(name, resident + weights, optimizer, host=self._offloaded + self._guesses, **held)

        generating = {"activations": self.generation.decoding, "kv": self.generation.kv}
        return (
            *((self._start(parts),) if self._starts else ()),
            phase("moves", self.generation.weights, buckets=standing + self._buckets),
            phase("generation", self.generation.weights, buckets=standing + self._beneath, **generating),
            phase("inference", self._offloaded, activations=self._scoring),
            phase("training", gradients=gradients, activations=passing),
        )

    def _start(self, parts: Sequence[tuple[ModelMemory, int]]) -> PhaseMemory:
        """Models are built one after the other: each has gradients before it has main weights, and no moments yet.
        Megatron copies every shard of a weight before it makes the main weights of it."""
        weights = optimizer = 0
        fullest = None
        for model, place in parts:
            weights += model.weights_bytes(place)
            stages = [PhaseMemory("start", weights, optimizer, model.gradient_bytes(place), 0, 0, 0, self._offloaded)]
            optimizer += model.main_weights_bytes(place)
            shard = model.weights_bytes(place) // model.layout.dp
            copy = min(model.largest_weight_bytes(place), shard) if model.main_weights_bytes(place) else 0
            stages.append(PhaseMemory("start", weights, optimizer, 0, copy, 0, 0, self._offloaded))
            fullest = max(*stages, *([fullest] if fullest else []), key=lambda stage: stage.device)
        assert fullest is not None, "a run trains a model"
        return fullest
