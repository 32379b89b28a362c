"""The parts of the run's models that one rank holds, one for each task, and the groups that connect them.

train      stages and optimizer
generate   a whole copy per generation instance, read by the engine
score      a copy per inference replica, offloaded in host memory
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.data.prompts import Prompt
from rlhfuse.decisions.layout_rules import least_vocab
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.fusion.inter.inference import FrozenModel
from rlhfuse.fusion.inter.rank_place import RankPlace
from rlhfuse.fusion.inter.request import Request
from rlhfuse.fusion.intra.p2p import Channels
from rlhfuse.fusion.intra.training_step import TrainedModel
from rlhfuse.gen.core.sequence import SamplingParams
from rlhfuse.gen.engine import EngineOptions
from rlhfuse.models.build import Activations, build_model, fill
from rlhfuse.models.hf import load_weights
from rlhfuse.models.stage import PipelineStage, TrainingStage
from rlhfuse.monitor.heartbeat import Waiting
from rlhfuse.parallel.connect import MOST_BYTES, GroupUse, connect, tensor_parallel_uses
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid, plain_grid, trained_grid
from rlhfuse.parallel.offload import OffloadedWeights, WeightMemory
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.planning.memory.instance_cache import InstanceCache
from rlhfuse.schedule.ir.ranks import FusedRanks, neighbour_pairs
from rlhfuse.tasks.placement import Placement
from rlhfuse.tasks.role import POLICY, Role
from rlhfuse.tasks.task import BENEATH, Kind, ModelTask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelFolders:
    """Local Hugging Face folder and shape of each role of the run; the weights of one without a folder stay unset."""

    paths: dict[Role, Path]
    specs: dict[Role, ModelSpec]

    def in_use(self, role: Role) -> ModelSpec:
        """The shape with those ids alone that all models of the run have: what draws tokens and scores them."""
        return replace(self.specs[role], vocab=least_vocab(self.specs))


@dataclass(frozen=True)
class RankModels:
    """This rank's models. The engine computes with the parameters of the generation copy.

    At first only models that train have device memory. Copies take theirs when they are first filled.
    """

    tasks: Sequence[ModelTask]
    parts: Mapping[str, Any]  # by task: TrainedModel, WeightMemory or FrozenModel, by the task's kind
    place: RankPlace
    holders: Mapping[str, WeightHolders]  # by task, of those that weights move between
    channels: Channels
    move_group: dist.ProcessGroup | None  # of all ranks, where weights move beneath generation
    groups: GroupMaker  # owns every process group of the above

    def _of(self, kind: Kind) -> dict[Any, Any]:
        return {task.role: self.parts[task.name] for task in self.tasks if task.kind == kind}

    @cached_property
    def trained(self) -> dict[str, TrainedModel]:
        """By role, the policy first."""
        return self._of("train")

    @cached_property
    def frozen(self) -> dict[Role, FrozenModel]:
        """Models that score, in this order."""
        return self._of("score")

    @cached_property
    def generation(self) -> WeightMemory:
        return self._of("generate")[POLICY]

    def offload_optimizers(self, free: bool) -> None:
        """Main weights and moments leave for the host; with `free` they are there and their device memory is free."""
        for model in self.trained.values():
            model.optimizer.states.leave()
        for model in self.trained.values() if free else ():
            model.optimizer.states.free()

    def held_bytes(self, with_host: bool) -> int:
        """What models and optimizers hold on the device now, and with `with_host` in host memory."""
        held = sum(weight.nbytes for weight in self.generation.module.parameters())
        held += sum(model.optimizer.held_bytes for model in self.trained.values())
        offloaded = sum(model.offloaded.host_bytes for model in self.frozen.values())
        return held + (offloaded if with_host else 0)


def build_models(
    config: RunConfig,
    tasks: Sequence[ModelTask],
    folders: ModelFolders,
    ranks: FusedRanks,
    rank: int,
    device: Device,
    progress: Callable[[str], None] = lambda _: None,
) -> RankModels:
    """Build the models of `tasks` on `rank` and load their weights, which move by resharding from then on.

    A collective.

    All are built and filled in host memory. The device gets the parts that train, one model after the other. `progress`
    is told of every model and of every tensor that is read: from a slow disk they may take long.
    """
    maker = GroupMaker()
    dtype = DTYPES[config.trainer.dtype]
    specs, paths = folders.specs, folders.paths
    activations = Activations.of(config.parallel, config.trainer)
    holders: dict[str, WeightHolders] = {}

    def build(role: Role, grid: ModelGrid, groups: Any, **part: Any) -> torch.nn.Module:
        progress(f"building models: {role}")
        kind: dict[str, Any] = {"scalar_head": role.scalar_head, "dtype": dtype, "device": device, "on_host": True}
        return build_model(specs[role], grid, groups, rank, **{**kind, **part})

    def note_holders(task: ModelTask, grid: ModelGrid) -> None:
        whole = specs[task.role], grid.layout, grid.cells, dtype.itemsize, task.role.scalar_head
        holders[task.name] = WeightHolders.of_layout(*whole)

    def trained(task: ModelTask) -> TrainedModel:
        role = task.role
        grid = trained_grid(ranks, role)
        note_holders(task, grid)
        groups = maker.for_model(role, grid, rank)
        head = role.scalar_head
        chunks = {}
        for stage in grid.stages_of(rank):
            chunks[stage] = build(role, grid, groups, stage=stage, activations=activations)
            load_part(chunks[stage], paths.get(role), specs[role], grid, rank, head, stage, role.fresh_head, progress)
        progress(f"building models: optimizer of the {role}")
        optimizer = ModelOptimizer(chunks, getattr(config, role).optim, groups, device)
        stages = {}
        for stage, module in optimizer.modules.items():
            part = PipelineStage(module, first=stage == 0, last=stage == grid.layout.stages - 1, scalar_head=head)
            stages[stage] = TrainingStage(part)
        return TrainedModel(role, folders.in_use(role), grid, stages, optimizer, groups.tp, dtype)

    def whole(task: ModelTask) -> tuple[torch.nn.Module, dist.ProcessGroup]:
        grid = plain_grid(task.layout)
        groups = maker.for_model("frozen", grid, rank)  # one after the other, so in one order on all ranks
        if task.role.trains:
            note_holders(task, grid)
        return build(task.role, grid, groups).requires_grad_(False), groups.tp

    def frozen(task: ModelTask) -> FrozenModel:
        role = task.role
        model, tp_group = whole(task)
        offloaded = OffloadedWeights(model, device)
        if not role.trains:  # the weights of others move here before they score
            offloaded.expose()
            grid = plain_grid(task.layout)
            load_part(model, paths.get(role), specs[role], grid, rank, role.scalar_head, progress=progress)
        offloaded.release()
        stage = PipelineStage(model, first=True, last=True, scalar_head=role.scalar_head)
        return FrozenModel(stage, offloaded, tp_group, task.layout.tp)

    placement = Placement.of(tasks)
    models = {task.name: trained(task) for task in tasks if task.training}
    generates = next(task for task in tasks if task.kind == "generate")
    copy, instance_group = whole(generates)
    generation = WeightMemory(copy, device)
    generation.release()
    scorers = {task.name: frozen(task) for task in tasks if task.kind == "score"}
    worker_group = maker.own("tp", placement.workers, rank)
    place = RankPlace(rank, placement, instance_group, worker_group)
    pairs = [pair for model in models.values() for pair in neighbour_pairs(model.grid.cells, model.grid.layout)]
    channels = Channels(rank, maker.channels("pipeline", pairs, device), device.torch_device)
    uses = [use for model in models.values() for use in model.optimizer.group_uses()]
    learners = [(model.role, model.tp_group) for model in models.values()]
    frozen_groups = [(task.role, scorers[task.name].tp_group) for task in tasks if task.name in scorers]
    for role, group in [*learners, *frozen_groups, (POLICY, instance_group)]:
        uses += tensor_parallel_uses(group, specs[role].hidden, specs[role].context, dtype)
    move_group = None
    if any(task.name in BENEATH for task in tasks):
        move_group = maker.group("moves", tuple(range(ranks.size)))
        uses.append(GroupUse(move_group, "all_reduce"))
    progress(Waiting("building models: connecting process groups"))
    connect(uses, device.torch_device)
    longest = max(model.spec.hidden * model.spec.context for model in models.values()) * dtype.itemsize
    channels.connect(min(longest, MOST_BYTES[device.torch_device.type]))
    parts = {**models, generates.name: generation, **scorers}
    return RankModels(tasks, parts, place, holders, channels, move_group, maker)


def engine_options(config: RunConfig, instances: int, keep_memory: bool = False) -> EngineOptions:
    """Options of the engine of one of `instances` generation instances."""
    rollout = config.rollout
    return EngineOptions(
        num_blocks=InstanceCache.of(config, instances).blocks,
        block_tokens=rollout.block_tokens,
        max_sequences=rollout.max_sequences_per_instance,
        max_batched_tokens=rollout.max_batched_tokens,
        cuda_graphs=rollout.cuda_graphs,
        attention=rollout.attention,
        entropies=config.algorithm.top_entropy_quantile < 1,
        keep_memory=keep_memory,
        all_reduce=rollout.all_reduce,
        draft_rows=None if rollout.draft_rows == AUTO else rollout.draft_rows,
    )


def sampling_params(config: RunConfig) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        max_tokens=rollout.max_response_tokens,
        min_tokens=rollout.min_tokens,
        stop_token_ids=rollout.stop_token_ids,
        stop=rollout.stop,
        seed=config.trainer.seed,
        ignore_eos=rollout.ignore_eos,
        turns=rollout.multi_turn.enable,
    )


def requests_of(
    iteration: int, prompts: Sequence[Prompt], copies: int, params: SamplingParams, first: int = 0
) -> list[Request]:
    """So many samples of each prompt, which lie at their places in the draw of the iteration, from `first` on."""
    return [
        Request(sample_id(iteration, place, copy), tuple(prompt.tokens), params)
        for place, prompt in enumerate(prompts, first)
        for copy in range(copies)
    ]


def load_part(
    model: torch.nn.Module,
    path: Path | None,
    spec: ModelSpec,
    grid: ModelGrid,
    rank: int,
    head: bool,
    stage: int | None = None,
    fresh_head: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Fill this rank's part, or its `stage`, from a Hugging Face folder, if any; `fresh_head`: zero without a head."""
    if path is None:
        return
    _, lowest, tp_rank = grid.position(rank)
    stage = lowest if stage is None else stage
    weights = load_weights(
        path,
        spec,
        tp_rank=tp_rank,
        tp_size=grid.layout.tp,
        layers=grid.layout.stage_layers(spec.layers)[stage],
        first=stage == 0,
        last=stage == grid.layout.stages - 1,
        scalar_head=head,
        fresh_head=fresh_head,
        dtype=next(model.parameters()).dtype,
        progress=progress,
    )
    fill(model, weights)
