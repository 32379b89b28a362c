"""A training case on gloo ranks, recorded whole, to be held against others.

`run_case` trains it on the workers and returns a `Recording`: the loss of every micro-batch, gradients as the optimizer
takes them (reduced and clipped) and weights as whole tensors under Hugging Face names, gradient norms, digests of all
bits, and live activations.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.tasks.balance import deal
from testkit.stages import load
from testkit.training_case import Case, scalar_head
from testkit.whole_model import BETAS, EPS


@dataclass
class RankRecord:
    """What one rank saw, ready to be sent: arrays, not tensors. Parameters are keyed by (stage, name)."""

    losses: dict[tuple[str, int, int], float] = field(default_factory=dict)  # (model, step, micro-batch of all) -> loss
    norms: list[dict[str, float]] = field(default_factory=list)
    gradients: dict[str, dict] = field(default_factory=dict)  # model -> (stage, name) -> (first element, flat array)
    weights: dict[str, dict] = field(default_factory=dict)  # model -> (stage, name) -> array
    digests: dict[str, str] = field(default_factory=dict)  # model -> of losses, gradients, weights, optimizer state
    peak_live: int = 0  # micro-batches kept at once, over all models


def train_rank(rank: int, case: Case) -> RankRecord:
    """Build this rank's parts, run the steps, record."""
    from rlhfuse.fusion.intra.training_step import TrainingStep
    from rlhfuse.parallel.device import choose_device

    device = choose_device("cpu", 0, 1)
    models, channels, maker = build_models(rank, case, device)
    programs = {
        rung: lower(schedule, case.ranks, tied=case.tied, reduce=case.reduce) for rung, schedule in case.family.items()
    }
    family = case.cut, case.family, programs
    step = TrainingStep(rank, case.ranks, *family, models, channels, 1.0, lambda _: None)
    record, hashes = RankRecord(), {name: hashlib.sha256() for name in models}
    for name, model in models.items():
        watch_gradients(model.optimizer, hashes[name], record.gradients.setdefault(name, {}))
    for number in range(case.steps):
        lr = dict.fromkeys(models, case.recipe.lr)
        result = step.run(case.batch(number), lr, case.algorithm)
        record.norms.append({model: s.grad_norm for model, s in result.steps.items()})
        record.peak_live = max(record.peak_live, result.report.peak_live)
        for action, loss in result.report.losses.items():
            name = case.planned.problem.pipeline(action.pipeline).model
            grid = models[name].grid
            dealt = deal(range(len(result.parts_tokens)), grid.layout.dp, grid.position(rank)[0])
            record.losses[name, number, dealt[action.microbatch]] = loss
            hashes[name].update(f"{action} {loss.hex()}".encode())
        for name, sums in ({} if case.recipe.by_sample else result.stats).items():
            of_name = [loss for key, loss in record.losses.items() if key[:2] == (name, number)]
            told = float(sums["vf_loss" if scalar_head(name) else "pg_loss"]) / result.tokens
            assert math.isclose(told, math.fsum(of_name), rel_tol=1e-5, abs_tol=1e-7), (name, told, of_name)
    for name, model in models.items():
        record.weights[name] = {key: p.detach().clone().numpy() for key, p in parameters(model.optimizer)}
        for array in [*record.weights[name].values(), *state_arrays(model.optimizer)]:
            hashes[name].update(array.tobytes())
        record.digests[name] = hashes[name].hexdigest()
    maker.close()
    return record


def build_models(rank: int, case: Case, device: Any) -> tuple[dict[str, Any], Any, Any]:
    """Trained models on their ranks, the channels between stages, and the maker that owns all groups."""
    from rlhfuse.fusion.intra.p2p import Channels
    from rlhfuse.fusion.intra.training_step import TrainedModel
    from rlhfuse.models.build import Activations
    from rlhfuse.parallel.groups import GroupMaker, trained_grid
    from rlhfuse.schedule.ir.ranks import neighbour_pairs
    from rlhfuse.tasks.role import Role

    maker, models, pairs, recipe = GroupMaker(600), {}, [], case.recipe
    config = OptimizerConfig(
        name=recipe.optimizer,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        clip_grad=recipe.clip_grad,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
    )
    activations = Activations(case.sequence_parallel, case.recompute)
    for name, folder in case.folders.items():
        grid = trained_grid(case.ranks, name)
        groups = maker.for_model(name, grid, rank)
        built = load(rank, grid, groups, folder, scalar_head(name), activations, config, device)
        role = Role(name, *(("value", "value") if built.head else ("logprobs", "policy")))
        models[name] = TrainedModel(role, built.spec, grid, built.stages, built.optimizer, groups.tp, torch.float32)
        pairs += neighbour_pairs(grid.cells, grid.layout)
    channels = Channels(rank, maker.channels("pipeline", pairs), device.torch_device)
    channels.connect()
    return models, channels, maker


def parameters(optimizer: Any) -> list[tuple[tuple[int, str], Tensor]]:
    """((stage, name), weights) of all stages on this rank."""
    return [
        ((stage, name), parameter)
        for stage, module in optimizer.modules.items()
        for name, parameter in module.module.named_parameters()
    ]


def watch_gradients(optimizer: Any, sha: Any, kept: dict) -> None:
    """Hash the gradients that every optimizer step takes, reduced and clipped, and keep those of the first step."""

    def note(*_: Any) -> None:
        first = not kept
        for key, start, weight in updated_here(optimizer):
            sha.update(weight.grad.numpy().tobytes())
            if first:
                kept[key] = start, weight.grad.detach().flatten().clone().numpy()

    for part in optimizer._parts()[:1]:
        part.optimizer.register_step_pre_hook(note)


def updated_here(optimizer: Any) -> list[tuple[tuple[int, str], int, Tensor]]:
    """((stage, name), first element, main weights) of what this rank updates: with ZeRO-1 shards, else all."""
    found = []
    for key, parameter in parameters(optimizer):
        for part in optimizer._parts():
            if not hasattr(part, "model_param_group_index_map"):
                found.append((key, 0, parameter))
            elif parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                start = part._get_model_param_range_map(parameter)["param"].start
                found.append((key, start, part.optimizer.param_groups[group]["params"][place]))
    return found


def state_arrays(optimizer: Any) -> list[Any]:
    """Everything that torch's optimizers remember here, in the order of their weights."""
    return [
        value.numpy()
        for part in optimizer._parts()
        for group in part.optimizer.param_groups
        for weight in group["params"]
        for _, value in sorted(part.optimizer.state.get(weight, {}).items())
        if isinstance(value, Tensor)
    ]


@dataclass(frozen=True)
class Recording:
    """A case's outcome over all ranks. Tensors are whole, in float32, under Hugging Face names."""

    case: Case
    losses: dict[tuple[str, int, int], float]  # (model, step, micro-batch among those of all pipelines)
    norms: list[dict[str, float]]
    gradients: dict[str, dict[str, Tensor]]  # of the first step
    weights: dict[str, dict[str, Tensor]]  # after the last step
    digests: dict[str, tuple[str, ...]]  # model -> one per rank
    peak_live: list[int]  # per rank


def run_case(workers: Any, case: Case) -> Recording:
    records = workers.run(train_rank, case)
    losses: dict[tuple[str, int, int], float] = {}
    for record in records:
        for key, value in record.losses.items():
            assert losses.setdefault(key, value) == value, f"tensor ranks disagree on the loss of {key}"
    assert all(record.norms == records[0].norms for record in records)
    return Recording(
        case,
        losses,
        records[0].norms,
        {model: whole(case, model, records, "gradients") for model in case.layouts},
        {model: whole(case, model, records, "weights") for model in case.layouts},
        {model: tuple(record.digests[model] for record in records) for model in case.layouts},
        [record.peak_live for record in records],
    )


def whole(case: Case, model: str, records: list[RankRecord], kind: str) -> dict[str, Tensor]:
    """Whole tensors of a model from the ranks' pieces; all copies of the same numbers must be equal."""
    from rlhfuse.models.hf import hf_tensors

    spec, layout = ModelSpec.from_config(case.folders[model]), case.parsed[model]
    layers = layout.stage_layers(spec.layers)
    found: dict[str, Tensor] = {}
    for place, cells in enumerate(case.ranks.dp_groups(model)):
        for key in records[cells[0][0]].weights[model]:
            stage, name = key
            assert stage % layout.pp == place
            parts = [one_copy([records[rank] for rank in ranks], model, key, kind) for ranks in cells]
            found[global_name(name, layers[stage])] = join(name, parts, scalar_head(model))
    if model in case.tied and layout.stages > 1:
        pair = found["output_layer.weight"], found["embedding.word_embeddings.weight"]
        assert torch.equal(*pair), f"{model}: tied {kind} differ by {(pair[0] - pair[1]).abs().max()}"
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert name not in found or not found[name][spec.vocab :].any(), f"{name}: padding has {kind}"
    return dict(hf_tensors(found, spec, scalar_head(model)))


def one_copy(replicas: list[RankRecord], model: str, key: tuple[int, str], kind: str) -> Tensor:
    """A tensor rank's parameter: equal on all replicas, or made of the shards that each of them updates."""
    weights = [torch.from_numpy(replica.weights[model][key]) for replica in replicas]
    if kind == "weights":
        assert all(torch.equal(weights[0], other) for other in weights), f"{model}: replicas differ in {key}"
        return weights[0]
    flat = torch.full((weights[0].numel(),), torch.nan)
    for start, array in (replica.gradients[model][key] for replica in replicas if key in replica.gradients[model]):
        piece = flat[start : start + len(array)]
        assert bool((piece.isnan() | (piece == torch.from_numpy(array))).all()), f"{model}: replicas differ in {key}"
        piece.copy_(torch.from_numpy(array))
    assert not flat.isnan().any(), f"{model}: nobody updates a part of {key}"
    return flat.view_as(weights[0])


def join(name: str, parts: list[Tensor], scalar_head: bool) -> Tensor:
    """The parts of all tensor ranks as one tensor."""
    if "linear_fc1" in name:
        return torch.cat([half for halves in zip(*(part.chunk(2) for part in parts)) for half in halves])
    if "linear_proj" in name or "linear_fc2" in name:
        return torch.cat(parts, dim=1)
    if "norm" in name or (scalar_head and "output_layer" in name):
        assert all(torch.equal(parts[0], part) for part in parts), f"tensor ranks differ in {name}"
        return parts[0]
    return torch.cat(parts)


def global_name(name: str, layers: range) -> str:
    if not name.startswith("decoder.layers."):
        return name
    _, _, local, rest = name.split(".", 3)
    return f"decoder.layers.{layers[int(local)]}.{rest}"
