"""Models on their training layouts, and one step of them by a program, for tests that look below TrainingStep.

Micro-batches are random sequences, and losses are sums that any code can compute: next-token losses of logits,
squared errors of values, each micro-batch with a weight of its own. Optimizers do nothing (a rate of 0, no clipping),
so that gradients can be read after a step; SGD is not sharded, so that every rank has all of its parameters' gradients.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.schedule.ir.ranks import FusedRanks, neighbour_pairs, rank_map
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.rules.builders import serial_1f1b
from testkit.training_pair import unit_problem

LENGTHS = ((7, 12, 3), (40,), (2, 2, 5), (19, 30))  # of the sequences of each micro-batch
VOCAB = 200


def random_rows(lengths, seed: int) -> list[list[list[int]]]:
    """Token ids [micro-batch][sequence]."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in row] for row in lengths]


def loss_of(batches, kept: dict[int, float]):
    """The loss function of a pipeline's last stage; `kept` receives its values."""

    def loss(out, microbatch: int):
        batch = batches[microbatch]
        total = 0.0

        def scaled(logprobs, entropy, rows):
            return -(0.3 + microbatch) * logprobs.sum()

        for a, b in real_borders(batch):
            if torch.is_tensor(out):
                total = total + (out[a:b] - batch.tokens[a:b] / VOCAB).square().sum()
            else:
                given = scaled, slice(a, b - 1), batch.tokens[a + 1 : b], VOCAB, 1.0
                total = total + out.loss(*given, by_token=microbatch % 2 == 0)  # by tiles it is made in two ways
        value = total * (0.3 + microbatch) if torch.is_tensor(out) else total
        kept[microbatch] = float(value.detach())
        return value

    return loss


def real_borders(batch) -> list[tuple[int, int]]:
    """First and end of every sequence but the dummy one."""
    borders = batch.sequences.borders
    pairs = list(zip(borders, borders[1:]))
    return pairs[:-1] if batch.padding else pairs


def write_reference_gradients(folder: Path, out: Path, head: bool, rows) -> dict[int, float]:
    """Gradients of the whole model in float64 by transformers, one sequence at a time, written like a checkpoint.

    Reading that checkpoint cuts them as it cuts weights. Returns the losses.
    """
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    model, losses = kind.from_pretrained(folder, dtype=torch.float64), {}
    for microbatch, sequences in enumerate(rows):
        total = 0.0
        for tokens in map(torch.tensor, sequences):
            if head:
                values = model.score(model.model(tokens[None]).last_hidden_state[0])[:, 0]
                total = total + (values - tokens / VOCAB).square().sum()
            else:
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                total = total - logprobs.gather(1, tokens[1:, None]).sum()
        total = total * (0.3 + microbatch)
        total.backward()
        losses[microbatch] = float(total.detach())
    out.mkdir()
    shutil.copyfile(folder / "config.json", out / "config.json")
    named = {name: p.grad.float() for name, p in model.named_parameters()}
    save_file(named, str(out / "model.safetensors"), metadata={"format": "pt"})
    return losses


@dataclass(frozen=True)
class Built:
    """One model on one rank."""

    spec: ModelSpec
    grid: Any
    groups: Any
    stages: Mapping[int, Any]  # TrainingStage by number
    optimizer: Any
    head: bool

    def gradients(self) -> dict[tuple[int, str], torch.Tensor]:
        """(stage, parameter) -> gradient."""
        return {
            (stage, name): parameter.main_grad.clone()
            for stage, module in self.optimizer.modules.items()
            for name, parameter in module.module.named_parameters()
        }


def build(
    rank: int, maker, ranks: FusedRanks, model: str, folder: Path, activations, optimizer="sgd", dtype=torch.float32
) -> Built:
    """The parts of `model` on this rank, loaded; a collective. Critics have a scalar head."""
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import trained_grid

    grid = trained_grid(ranks, model)
    groups = maker.for_model(model, grid, rank)
    config = OptimizerConfig(name=optimizer, lr=0.0, clip_grad=0.0)
    return load(rank, grid, groups, folder, model == "critic", activations, config, choose_device("cpu", 0, 1), dtype)


def load(rank: int, grid, groups, folder: Path, head: bool, activations, config, device, dtype=torch.float32) -> Built:
    """The stages of a checkpoint that are this rank's, with their optimizer; `head` for a scalar one."""
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PipelineStage, TrainingStage
    from rlhfuse.parallel.optimizer import ModelOptimizer
    from rlhfuse.run.rank_models import load_part

    spec, chunks = ModelSpec.from_config(folder), {}
    for stage in grid.stages_of(rank):
        chunks[stage] = build_model(
            spec, grid, groups, rank, scalar_head=head, dtype=dtype, device=device, stage=stage, activations=activations
        )
        load_part(chunks[stage], folder, spec, grid, rank, head, stage)
    owner = ModelOptimizer(chunks, config, groups, device)
    stages = {
        stage: TrainingStage(
            PipelineStage(module, first=stage == 0, last=stage == grid.layout.stages - 1, scalar_head=head)
        )
        for stage, module in owner.modules.items()
    }
    return Built(spec, grid, groups, stages, owner, head)


def build_alone(rank: int, layout: str, folder: Path, *, head=False, activations=None, dtype=torch.float32, **optim):
    """(a model that trains by itself in `layout`, the maker of its groups); `optim`: settings of its optimizer."""
    from rlhfuse.models.build import WHOLE
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, trained_grid

    name, maker = "critic" if head else "actor", GroupMaker(600)
    grid = trained_grid(ranks_of(**{name: layout}), name)
    groups, config = maker.for_model(name, grid, rank), OptimizerConfig(**{"lr": 1e-2, **optim})
    return load(
        rank, grid, groups, folder, head, activations or WHOLE, config, choose_device("cpu", 0, 1), dtype
    ), maker


def copy_for(rank: int, maker, spec: ModelSpec, layout: str, head: bool = False):
    """(an empty copy of a model in a `layout` of generation, that layout's grid)."""
    from rlhfuse.models.build import build_model
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import plain_grid

    grid, device = plain_grid(ParallelLayout.parse(layout)), choose_device("cpu", 0, 1)
    groups = maker.for_model("generation", grid, rank)
    return build_model(spec, grid, groups, rank, scalar_head=head, dtype=torch.float32, device=device), grid


def packed_for(built: Built, rows):
    """PackedTokens of each micro-batch, as the model's stages want them."""
    from rlhfuse.models.stage import PackedTokens

    shards = next(iter(built.stages.values())).stage.shards
    return tuple(PackedTokens.pack(row, torch.device("cpu"), shards) for row in rows)


def one_step(rank: int, maker, ranks: FusedRanks, models: Mapping[str, Built], rows, builder=serial_1f1b) -> dict:
    """Run one step of `builder`'s schedule on the models' micro-batches; returns losses by model and micro-batch.

    `rows[model][pipeline]` are the micro-batches of a pipeline, as many in each of them.
    """
    from rlhfuse.fusion.intra.executor import PipelineParts, PipelineWork, ProgramExecutor
    from rlhfuse.fusion.intra.p2p import Channels

    first = next(iter(rows.values()))
    schedule = builder(unit_problem(ranks.shape.layouts, len(first[0])))
    tied = frozenset(name for name, built in models.items() if built.spec.tied_embeddings and not built.head)
    program = lower(schedule, ranks, tied=tied)[rank]
    pairs = [pair for built in models.values() for pair in neighbour_pairs(built.grid.cells, built.grid.layout)]
    channels = Channels(rank, maker.channels("pipeline", pairs), torch.device("cpu"))
    channels.connect()
    parts, work, losses = {}, {}, {}
    for model, built in models.items():
        built.optimizer.zero_grad()
        name, kept = ranks.pipeline_of(model, rank), losses.setdefault(model, {})
        pipeline, _, _ = built.grid.position(rank)
        batches = packed_for(built, rows[model][pipeline])
        dtype = next(next(iter(built.optimizer.modules.values())).parameters()).dtype
        parts[name] = PipelineParts(model, built.stages, built.optimizer, dtype)
        work[name] = PipelineWork(tuple(map(len, batches)), batches.__getitem__, loss_of(batches, kept), 0.0)
    ProgramExecutor(program, parts, channels, lambda _: None).run(work)
    return losses


def ranks_of(**layouts: str) -> FusedRanks:
    return rank_map({model: ParallelLayout.parse(text) for model, text in layouts.items()})
