"""Memory of a rank in each phase of an iteration, in bytes, against what it may have.

The models that train stay in device memory; what the other phases need comes before they begin and goes when they end.
A phase is priced on its fullest rank, all samples as long as they can become. What training holds beside the
activations of its schedule is the static memory of the scheduling problem, whose cap is the limit of a rank
(paper section 5.2, constraint 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.machine import communicator_bytes, host_memory, ranks_on_machine
from rlhfuse.decisions.decode_shapes import draft_bytes
from rlhfuse.planning.passing import PassingMemory
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.ranks import FusedRanks
from rlhfuse.schedule.ir.schedule import Schedule

SCORERS = ("reference_inference", "reward_inference", "critic_inference")
TRAINED = ("actor_train", "critic_train")
TOKEN_BYTES, RESPONSE_BYTES = 16, 36  # of a mini-batch: ids and positions; which row, which id, and five numbers
KEEPING_PART = 0.9  # of the limit, where generation is kept: graphs have a memory pool of their own, two fragment more
SMALL_BYTES = 8 * 512  # of a micro-batch: borders, sums of its loss and whether it is finite, of 512 bytes each
RESTING = ("moves", "generation", "inference")  # phases in which the optimizer may rest on the host
DEVICE_PARTS = ("weights", "optimizer", "gradients", "activations", "kv", "buckets")
REMEDIES = {
    "start": "use more stages or tensor ranks for parallel.actor_train and parallel.critic_train",
    "moves": "use more tensor ranks for parallel.generation and parallel.inference",
    "generation": "lower rollout.kv_blocks_per_instance or use more tensor ranks for parallel.generation",
    "inference": "lower rollout.max_batched_tokens or use more tensor ranks for parallel.inference",
    "training": "raise fusion.actor_microbatches, set trainer.recompute=full or use more stages or tensor ranks",
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

    @property
    def device(self) -> int:
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

    @property
    def process(self) -> int:
        """Bytes of a rank that no phase names: its process or CUDA context, and communicators."""
        return self.hardware.process_bytes + self.communicators

    def held_by(self, schedule: Schedule) -> tuple[float, ...]:
        """Activations of a schedule by node, so that with what passes at most they are training's peak."""
        return self.passing.held_by(schedule) if self.passing else tuple(evaluate(schedule).node_peak_memory)

    def with_generation_kept(self) -> MemoryBudget:
        """Where the actor's copy and the cache never leave the device."""
        ranks = (replace(rank, static=tuple(map(self.generation.beside, rank.static))) for rank in self.ranks)
        return replace(self, ranks=tuple(ranks))

    def keeps_generation(self, activations: Sequence[float]) -> bool:
        """Whether they stay: on GPUs, where every phase has room for them, the optimizer and KEEPING_PART's margin."""
        fits = self.keeping_bytes(activations) <= KEEPING_PART * self.limit
        return fits and self.hardware.name != "cpu" and not self.offload

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
        return phase.device + self.process + (phase.host if self.hardware.name == "cpu" else 0)

    def fits_beside_training(self, headroom: float = 0.0) -> bool:
        """Whether the phases do in which the optimizer may rest on the host, and leave such a share of a rank free."""
        return all(self.leaves(headroom, phase) for phase in self.static if phase.phase in RESTING)

    @property
    def _would_fit_offloaded(self) -> bool:
        on_gpu = self.hardware.name != "cpu"
        return on_gpu and not self.offload and self.with_optimizer_offloaded().fits_beside_training()

    def leaves(self, headroom: float, phase: PhaseMemory) -> bool:
        """Whether a phase does; in generation the cache takes what it may have."""
        share = 1.0 if phase.phase == "generation" else 1.0 - headroom
        return self.needed(phase) <= self.limit * share

    def with_optimizer_offloaded(self, headroom: float = 0.0) -> MemoryBudget:
        """The optimizer on the host outside training; it leaves before the moves where they do not fit beside it."""
        beside = all(self.leaves(headroom, phase) for phase in self.static if phase.phase == RESTING[0])
        resting = RESTING[beside:]
        ranks = []
        for rank in self.ranks:
            held = rank.static[-1].optimizer
            phases = (
                replace(one, host=one.host + held, optimizer=0 if one.phase in resting else one.optimizer)
                if one.phase != "start"
                else one
                for one in rank.static
            )
            ranks.append(replace(rank, static=tuple(phases)))
        most = max(rank.static[-1].optimizer for rank in self.ranks)
        offload = OptimizerOffload(resting[0], most, most / self.hardware.host_bandwidth)
        return replace(self, ranks=tuple(ranks), offload=offload)

    def with_early_loading(self, weights: Sequence[int]) -> MemoryBudget:
        """On GPUs, as many of the scorers' `weights`, in order, as have room beside generation with KEEPING_PART's
        margin."""
        phases = (phase for phase in self.static if phase.phase == "generation")
        room = KEEPING_PART * self.limit - self.generation.graphs - max(map(self.needed, phases))
        fitting = sum(total <= room for total in accumulate(weights)) if self.hardware.name != "cpu" else 0
        early, ranks = tuple(weights[:fitting]), []
        for rank in self.ranks:
            phases = (
                replace(one, weights=one.weights + sum(early)) if one.phase == "generation" else one
                for one in rank.static
            )
            ranks.append(replace(rank, static=tuple(phases)))
        return replace(self, ranks=tuple(ranks), early=early)

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
        if self.hardware.name == "cpu":
            parts.append(f"host copies {readable_bytes(fullest.host)}")
        if self.process:
            parts.append(f"the process {readable_bytes(self.process)}")
        which, remedy = "", REMEDIES[fullest.phase]
        if fullest.phase == "training":
            smallest = max(self.needed(rank.phases(least)[-1]) for rank in self.ranks)
            which = f" with {order}" if smallest < needed else ""
            which += f"; the least of any schedule is {readable_bytes(smallest)}"
            if smallest <= self.limit:
                remedy = f"set fusion.intra_stage=search without fusion.schedule to find one that fits, {remedy}"
        elif self._would_fit_offloaded:
            remedy = f"set trainer.offload_optimizer=auto, {remedy}"
        raise MemoryRefusal(
            fullest.phase,
            needed - self.limit,
            f"memory: {fullest.phase} needs {readable_bytes(needed)} per rank ({', '.join(parts)}){which}, but a rank "
            f"of this {self.hardware.name} has {readable_bytes(self.limit)}; {remedy}, or set trainer.memory_limit_gb",
        )


def check_host_memory(config: RunConfig, memory: MemoryBudget, world_size: int) -> None:
    """Raise InputError unless a machine with GPUs has host memory for all copies of its ranks, and their processes."""
    hardware = memory.hardware
    if hardware.name == "cpu":  # where it is the limit of a rank
        return
    ranks, (has, source) = ranks_on_machine(hardware, world_size), host_memory(config, hardware)
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
    config: RunConfig,
    costs: Mapping[str, AnalyticCost],
    ranks: FusedRanks,
    kv_capacity_bytes: float,
    samples_per_microbatch: float,
) -> MemoryBudget:
    """The budget of a run; `costs` has one entry per task, `kv_capacity_bytes` is C of a whole instance."""
    needs = _Needs(config, costs, kv_capacity_bytes, samples_per_microbatch)
    kinds: dict[tuple[int, ...], RankMemory] = {}
    for rank in range(ranks.shape.nodes * ranks.shape.node_ranks):  # every replica has ranks at the same places
        places = tuple(ranks.locate(model, rank)[1] for model in ranks.shape.layouts)
        if places not in kinds:
            kinds[places] = RankMemory(places, ranks.node_of(rank), needs.phases(places))
    hardware = costs["generation"].hardware
    limit = memory_limit(config, hardware, ranks.size)
    trained = {task.removesuffix("_train"): costs[task] for task in TRAINED if task in costs}
    tokens, on_gpu = needs.microbatch_tokens, hardware.name != "cpu"
    passing = PassingMemory.of(trained, tokens) if on_gpu else None
    layouts = {} if config.trainer.share_gpu else {task: cost.layout for task, cost in costs.items()}
    tied = {model for model, cost in trained.items() if cost.spec.tied_embeddings and not cost.scalar_head}
    buffers = communicator_bytes(config, hardware, layouts, ranks, tied) if layouts else 0  # else through the host
    return MemoryBudget(tuple(kinds.values()), hardware, *limit, tokens, needs.generation, None, (), passing, buffers)


def input_bytes(config: RunConfig, samples: float) -> int:
    """What a GPU holds of a mini-batch's samples while it trains on them, `samples` to a micro-batch, before dp."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    minibatch = config.samples_per_iteration // config.algorithm.minibatches
    sample = TOKEN_BYTES * longest + RESPONSE_BYTES * config.rollout.max_response_tokens
    return int(minibatch * (sample + SMALL_BYTES / samples))


class _Needs:
    """Bytes of the phases, rank by rank.

    Generation and scoring keep no activations for a backward: they hold the widest layer's of a batch, and the float32
    logits where there is a head, in generation those of the sequences that draw a token.
    """

    def __init__(
        self, config: RunConfig, costs: Mapping[str, AnalyticCost], kv_capacity_bytes: float, samples: float
    ) -> None:
        rollout, generation = config.rollout, costs["generation"]
        batched = rollout.max_batched_tokens
        self._trained = [costs[task] for task in TRAINED if task in costs]
        scorers = [costs[task] for task in SCORERS if task in costs]
        self._on_gpu = generation.hardware.name != "cpu"
        self._offloaded = sum(cost.weights_bytes() for cost in scorers)
        written = config.samples_per_iteration * rollout.max_response_tokens
        self._guesses = draft_bytes(written) if rollout.draft_rows else 0
        self._critic = costs["critic_inference"].weights_bytes() if "critic_inference" in costs else 0
        copy, drawing = generation.weights_bytes(), min(rollout.max_sequences_per_instance, batched)
        self._buckets = min(config.fusion.bucket_mib << 20, max(copy, self._critic))
        self._decoding = generation.prefilling_bytes(batched, drawing)
        graphs = generation.prefilling_bytes(drawing, drawing) if self._on_gpu and rollout.cuda_graphs else 0
        self.generation = GenerationMemory(copy, int(kv_capacity_bytes / generation.layout.tp), graphs)
        self._scoring = max((cost.scoring_bytes(batched) for cost in scorers), default=0)
        longest = config.data.max_prompt_tokens + rollout.max_response_tokens
        self.microbatch_tokens = samples * longest
        self._inputs = input_bytes(config, samples)
        self._gathering = max(cost.gathering_bytes(self.microbatch_tokens) for cost in self._trained)
        self._rotations = generation.rotation_bytes(generation.spec.context)
        self._rotations += sum(cost.rotation_bytes(longest) for cost in (*scorers, *self._trained))

    def phases(self, places: tuple[int, ...]) -> tuple[PhaseMemory, ...]:
        """Phases of a rank at these places of the pipelines of the models that train."""
        parts = list(zip(self._trained, places))
        resident = sum(cost.weights_bytes(place) for cost, place in parts)
        optimizer = sum(cost.optimizer_bytes(place) for cost, place in parts)
        gradients = sum(cost.gradient_bytes(place) for cost, place in parts)
        standing = int(self._gathering + self._rotations)
        standing += int(sum(cost.receiving_bytes(self.microbatch_tokens, place) for cost, place in parts))
        inputs = sum(self._inputs // cost.layout.dp for cost, _ in parts) if self._on_gpu else 0
        passing = inputs + max(cost.passing_bytes(self.microbatch_tokens, place) for cost, place in parts)

        def phase(name: str, weights: int = 0, **others: float) -> PhaseMemory:
            held = dict(gradients=0, activations=0, kv=0, buckets=standing) | {
                key: int(value) for key, value in others.items()
            }
            return PhaseMemory(name, resident + weights, optimizer, host=self._offloaded + self._guesses, **held)

        return (
            *((self._start(parts),) if self._on_gpu else ()),
            phase("moves", self.generation.weights + self._critic, buckets=standing + self._buckets),
            phase("generation", self.generation.weights, activations=self._decoding, kv=self.generation.kv),
            phase("inference", self._offloaded, activations=self._scoring),
            phase("training", gradients=gradients, activations=passing),
        )

    def _start(self, parts: Sequence[tuple[AnalyticCost, int]]) -> PhaseMemory:
        """Models are built one after the other: each has gradients before it has main weights, and no moments yet.
        Megatron copies every shard of a weight before it makes the main weights of it."""
        weights = optimizer = 0
        fullest = None
        for cost, place in parts:
            weights += cost.weights_bytes(place)
            stages = [PhaseMemory("start", weights, optimizer, cost.gradient_bytes(place), 0, 0, 0, self._offloaded)]
            optimizer += cost.main_weights_bytes(place)
            shard = cost.weights_bytes(place) // cost.layout.dp
            copy = min(cost.largest_weight_bytes(place), shard) if cost.main_weights_bytes(place) else 0
            stages.append(PhaseMemory("start", weights, optimizer, 0, copy, 0, 0, self._offloaded))
            fullest = max(*stages, *([fullest] if fullest else []), key=lambda stage: stage.device)
        assert fullest is not None, "a run trains a model"
        return fullest


def memory_limit(config: RunConfig, hardware: HardwareSpec, world_size: int) -> tuple[float, str]:
    """Bytes that one rank may use, and where the number is from. The ranks of a CPU node, or of a GPU, share them."""
    if config.trainer.memory_limit_gb:
        return config.trainer.memory_limit_gb * 1e9, "trainer.memory_limit_gb"
    if hardware.name != "cpu" and not config.trainer.share_gpu:
        return hardware.memory_bytes, f"of {'the smallest of' if ',' in hardware.name else 'one'} {hardware.name}"
    ranks = ranks_on_machine(hardware, world_size)
    whole, owner = hardware.memory_bytes, f"this {hardware.name}'s"
    if hardware.name == "cpu":
        whole, owner = host_memory(config, hardware)
    return whole / ranks, f"{owner} {readable_bytes(whole)} / {ranks} ranks"


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
