"""One training of several models on gloo ranks, described by a value and recorded whole, to be held against others.

A `Case` says models, layouts, schedule, micro-batches, steps and optimizer; `run_case` trains it on the workers and
returns a `Recording`: the loss of every micro-batch, gradients as the optimizer takes them (reduced and clipped) and
weights as whole tensors under Hugging Face names, gradient norms, digests of all bits, and live activations.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping

import torch
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor
from whole_model import ADAM, BETAS, EPS, SGD, Recipe

from rlhfuse.config import AlgorithmConfig, OptimizerConfig
from rlhfuse.ppo.balance import cut_microbatches
from rlhfuse.ppo.rollout import Rollout, RolloutBatch
from rlhfuse.schedule.builders import greedy, gpipe, serial_1f1b
from rlhfuse.schedule.evaluate import evaluate
from rlhfuse.schedule.lowering import lower
from rlhfuse.schedule.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.ranks import FusedRanks, rank_map
from rlhfuse.schedule.schedule import Schedule
from rlhfuse.spec import ModelSpec, ParallelLayout

BUILDERS = {"fused": greedy, "gpipe": gpipe, "serial": serial_1f1b}
SAMPLES, VOCAB = 24, 56


@dataclass(frozen=True)
class Case:
    """What is trained. The first model's pipelines run `microbatches` micro-batches each, the others as many in all."""

    layouts: Mapping[str, str]
    folders: Mapping[str, Path]
    schedule: str = "fused"
    microbatches: int = 4
    steps: int = 3
    recipe: Recipe = SGD
    samples: int = SAMPLES

    def but(self, **changes: Any) -> "Case":
        return replace(self, **changes)

    def with_layouts(self, *layouts: str) -> "Case":
        return replace(self, layouts=dict(zip(self.layouts, layouts)))

    @property
    def parsed(self) -> dict[str, ParallelLayout]:
        return {model: ParallelLayout.parse(text) for model, text in self.layouts.items()}

    @property
    def world(self) -> int:
        return next(iter(self.parsed.values())).size

    @property
    def ranks(self) -> FusedRanks:
        return rank_map(*self.parsed.values())

    @property
    def counts(self) -> dict[str, int]:
        """Micro-batches per pipeline of each model."""
        shares = self.ranks.shape.shares
        total = shares[0].pipelines * self.microbatches
        return {share.model: total // share.pipelines for share in shares}

    @property
    def problem(self) -> FusionProblem:
        costs = [StageCosts((1,) * p.pp, (2,) * p.pp, (1,) * p.pp) for p in self.parsed.values()]
        return fused_problem(*self.parsed.values(), self.microbatches, *costs)

    @property
    def planned(self) -> Schedule:
        return BUILDERS[self.schedule](self.problem)

    @property
    def batches(self) -> list[RolloutBatch]:
        return [make_batch(step, self.samples) for step in range(self.steps)]

    def parts(self, step: int) -> list[list[int]]:
        """Samples of every micro-batch of a mini-batch: all pipelines' of one model in a row, whichever model."""
        first = next(iter(self.layouts))
        count = len(self.ranks.pipelines(first)) * self.microbatches
        return cut_microbatches(make_batch(step, self.samples).lengths.tolist(), count)


def write_model(folder: Path, *, scalar_head: bool = False, seed: int, **shape: Any) -> Path:
    """A random model whose matrices are small, as a trained model's are.

    In one process float32 gradients of such a model are 4e-7 to 8e-7 of each tensor's largest from float64's; with
    matrices of norm 1 the same arithmetic is 3e-6 away, because the residual stream amplifies every rounding.
    """
    write_checkpoint(folder, scalar_head=scalar_head, seed=seed, vocab_size=VOCAB, **shape)
    file = folder / "model.safetensors"
    tensors = {
        name: tensor * 0.3 if tensor.ndim > 1 and "embed" not in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def make_batch(seed: int, samples: int = SAMPLES) -> RolloutBatch:
    """A mini-batch of random samples of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    rollouts = []
    for i in range(samples):
        prompt, length = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((2, 9), (1, 30)))
        tokens = torch.randint(3, VOCAB, (prompt + length,), generator=generator).tolist()
        noise = 0.3 * torch.randn(2, length, generator=generator)
        rollouts.append(
            Rollout(i, tuple(tokens[:prompt]), tuple(tokens[prompt:]), -4 + noise[0], "stop", None, noise[1], 0.5)
        )
    batch = RolloutBatch.from_rollouts(rollouts)
    advantages, returns = torch.randn(2, batch.response_tokens, generator=generator)
    return batch.with_fields(advantages=advantages, returns=returns)


# on a rank ------------------------------------------------------------------------------------------------------


@dataclass
class RankRecord:
    """What one rank saw, ready to be sent: arrays, not tensors."""

    losses: dict[tuple[str, int, int], float] = field(default_factory=dict)  # (model, step, micro-batch of all) -> loss
    norms: list[dict[str, float]] = field(default_factory=list)
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)  # model -> see `pieces_of`
    digests: dict[str, str] = field(default_factory=dict)  # model -> of losses, gradients, weights, optimizer state
    peak_live: dict[str, int] = field(default_factory=dict)
    peak_live_of_all: int = 0


def train_rank(rank: int, case: Case) -> RankRecord:
    """Build this rank's parts, run the steps, record."""
    from rlhfuse.fusion.pair_step import PairStep
    from rlhfuse.parallel.device import choose_device

    device = choose_device("cpu", 0, 1)
    record = RankRecord()
    models, channels, maker = build_models(rank, case, device)
    watch = Watch(case, rank, models, record)
    program = lower(case.planned, case.ranks)[rank]
    step = PairStep(
        rank, case.ranks, program, models, channels, AlgorithmConfig(), 1.0, device.torch_device, lambda _: None
    )
    for number, batch in enumerate(case.batches):
        watch.step = number
        result = step.run(batch, case.counts, dict.fromkeys(models, case.recipe.lr))
        record.norms.append({model: s.grad_norm for model, s in result.steps.items()})
    watch.finish()
    maker.close()
    return record


def build_models(rank: int, case: Case, device: Any) -> tuple[dict[str, Any], Any, Any]:
    """Trained models on their ranks, the channels between stages, and the maker that owns all groups."""
    from rlhfuse.fusion.p2p import Channels
    from rlhfuse.fusion.pair_step import TrainedModel
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PipelineStage, TrainingStage
    from rlhfuse.parallel.groups import GroupMaker, ModelGrid, connect
    from rlhfuse.parallel.optimizer import ModelOptimizer
    from rlhfuse.roles import load_part, neighbour_pairs

    maker, models, recipe = GroupMaker(60.0), {}, case.recipe
    config = OptimizerConfig(recipe.lr, 0, recipe.weight_decay, *BETAS, EPS, recipe.clip_grad)
    for name, folder in case.folders.items():
        spec, grid, head = ModelSpec.from_config(folder), ModelGrid(case.ranks.pipelines(name)), name == "critic"
        groups = maker.for_model(name, grid, rank)
        model = build_model(spec, grid, groups, rank, scalar_head=head, dtype=torch.float32, device=device)
        load_part(model, folder, spec, grid, rank, head)
        optimizer = ModelOptimizer(model, config, groups, device)
        if recipe.optimizer == "sgd":
            use_sgd(optimizer)
        stage = grid.position(rank)[1]
        part = PipelineStage(optimizer.module, first=stage == 0, last=stage == grid.pp - 1, scalar_head=head)
        models[name] = TrainedModel(name, spec, grid, TrainingStage(part), optimizer, groups.tp, torch.float32)
    pairs = [pair for model in models.values() for pair in neighbour_pairs(model.grid)]
    channels = Channels(rank, maker.channels("pipeline", pairs), device.torch_device)
    connect([model.tp_group for model in models.values()], device.torch_device)
    channels.connect()
    return models, channels, maker


def use_sgd(optimizer: Any) -> None:
    """Put torch's SGD in place of Adam, over the same shards: reduction, norm, clipping and gather stay."""
    zero = inner(optimizer)
    sgd = torch.optim.SGD([torch.zeros(1)])
    sgd.param_groups = [sgd.defaults | group for group in zero.optimizer.param_groups]
    zero.optimizer = sgd


def inner(optimizer: Any) -> Any:
    (zero,) = optimizer.optimizer.chained_optimizers
    return zero


class Watch:
    """Notes losses, live activations and gradients while a rank trains, without changing what it computes."""

    def __init__(self, case: Case, rank: int, models: Mapping[str, Any], record: RankRecord) -> None:
        self.case, self.rank, self.models, self.record = case, rank, models, record
        self.step = 0
        self.hashes = {name: hashlib.sha256() for name in models}
        for name, model in models.items():
            self._watch_stage(name, model)
            inner(model.optimizer).optimizer.register_step_pre_hook(lambda *_, n=name: self._note_gradients(n))

    def _watch_stage(self, name: str, model: Any) -> None:
        forward, first = model.stage.forward, model.grid.position(self.rank)[0] * self.case.counts[name]

        def watched(microbatch: int, batch: Any, hidden: Tensor | None, loss: Any) -> Any:
            def noted(out: Tensor, number: int) -> Tensor:
                value = loss(out, number)
                self.record.losses[name, self.step, first + number] = float(value.detach())
                self.hashes[name].update(value.detach().numpy().tobytes())
                return value

            out = forward(microbatch, batch, hidden, noted)
            live = sum(other.stage.live for other in self.models.values())
            self.record.peak_live_of_all = max(self.record.peak_live_of_all, live)
            return out

        model.stage.forward = watched

    def _note_gradients(self, name: str) -> None:
        pieces = self.record.pieces.setdefault(name, {"gradients": {}, "ranges": {}, "weights": {}})
        for parameter, (start, end), main in shards(self.models[name].optimizer):
            self.hashes[name].update(main.grad.numpy().tobytes())
            if self.step == 0:
                pieces["gradients"][parameter] = main.grad.flatten().clone().numpy()
                pieces["ranges"][parameter] = (start, end)

    def finish(self) -> None:
        from rlhfuse.parallel.optimizer_state import export_state

        for name, model in self.models.items():
            if self.case.recipe.optimizer == "adam":
                for key, value in sorted(export_state(model.optimizer).items()):
                    self.hashes[name].update(key.encode() + value.numpy().tobytes())
            for key, parameter in model.optimizer.module.module.named_parameters():
                array = parameter.detach().clone().numpy()
                self.hashes[name].update(array.tobytes())
                self.record.pieces[name]["weights"][key] = array
            self.record.digests[name] = self.hashes[name].hexdigest()
            self.record.peak_live[name] = model.stage.peak_live


def shards(optimizer: Any) -> list[tuple[str, tuple[int, int], Tensor]]:
    """(parameter, its elements that this rank updates, their flat main weights)."""
    zero, found = inner(optimizer), []
    for name, parameter in optimizer.module.module.named_parameters():
        if parameter in zero.model_param_group_index_map:
            group, place = zero.model_param_group_index_map[parameter]
            piece = zero._get_model_param_range_map(parameter)["param"]
            found.append((name, (piece.start, piece.end), zero.optimizer.param_groups[group]["params"][place]))
    return found


# all ranks together ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A case's outcome over all ranks. Tensors are whole, in float32, under Hugging Face names."""

    case: Case
    losses: dict[tuple[str, int, int], float]  # (model, step, micro-batch among those of all pipelines)
    norms: list[dict[str, float]]
    gradients: dict[str, dict[str, Tensor]]  # of the first step
    weights: dict[str, dict[str, Tensor]]  # after the last step
    digests: dict[str, tuple[str, ...]]  # model -> one per rank
    peak_live: list[dict[str, int]]
    peak_live_of_all: list[int]


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
        [record.peak_live_of_all for record in records],
    )


def whole(case: Case, model: str, records: list[RankRecord], kind: str) -> dict[str, Tensor]:
    """Whole tensors of a model from the ranks' pieces; all copies of the same numbers must be equal."""
    from rlhfuse.models.hf import to_hf

    spec = ModelSpec.from_config(case.folders[model])
    layers = case.parsed[model].stage_layers(spec.layers)
    found: dict[str, Tensor] = {}
    for stage, groups in enumerate(case.ranks.dp_groups(model)):
        cells = [[records[rank].pieces[model] for rank in ranks] for ranks in groups]
        for name in cells[0][0]["weights"]:
            parts = [one_copy([piece for piece in cell], name, kind) for cell in cells]
            key = global_name(name, layers[stage])
            tensor = join(name, parts, model == "critic")
            if key in found:
                assert torch.equal(found[key], tensor), f"{model}: copies of {key} differ"
            found[key] = tensor
    if spec.tied_embeddings and "output_layer.weight" in found and model != "critic":
        pair = found["output_layer.weight"], found["embedding.word_embeddings.weight"]
        assert torch.equal(*pair), f"{model}: tied {kind} differ by {(pair[0] - pair[1]).abs().max()}"
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert name not in found or not found[name][spec.vocab :].any(), f"{name}: padding has {kind}"
    return to_hf(found, spec, model == "critic")


def one_copy(replicas: list[dict[str, Any]], name: str, kind: str) -> Tensor:
    """A tensor rank's parameter: equal on all replicas, or made of the shards that each of them updates."""
    weights = [torch.from_numpy(replica["weights"][name]) for replica in replicas]
    if kind == "weights":
        assert all(torch.equal(weights[0], other) for other in weights), f"replicas differ in {name}"
        return weights[0]
    flat = torch.full((weights[0].numel(),), torch.nan)
    for replica in replicas:
        if name in replica["ranges"]:
            start, end = replica["ranges"][name]
            flat[start:end] = torch.from_numpy(replica["gradients"][name])
    assert not flat.isnan().any(), f"nobody updates a part of {name}"
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


# comparisons ----------------------------------------------------------------------------------------------------


def distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], relative: bool) -> float:
    """Largest difference over all tensors; `relative`: to each tensor's own largest element."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    worst = 0.0
    for name, tensor in wanted.items():
        difference = float((found[name].double() - tensor.double()).abs().max())
        worst = max(worst, difference / float(tensor.abs().max()) if relative else difference)
    return worst


def predicted_peaks(case: Case) -> list[int]:
    """Micro-batches of all models kept at once on every rank, by the schedule (an activation counts as 1)."""
    nodes = evaluate(case.planned).node_peak_memory
    return [int(nodes[rank // case.ranks.shape.node_ranks % len(nodes)]) for rank in range(case.world)]
