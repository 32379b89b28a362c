"""Our serial 1F1B against Megatron-core's own schedule function: the same stages, batches and losses, the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

from rlhfuse.config import OptimizerConfig
from rlhfuse.schedule.builders import serial_1f1b
from rlhfuse.schedule.lowering import lower
from rlhfuse.schedule.problem import StageCosts, fused_problem
from rlhfuse.schedule.ranks import rank_map
from rlhfuse.spec import ModelSpec, ParallelLayout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

MICROBATCHES = 4
LENGTHS = {  # of the sequences of each micro-batch
    "packed, of any length": ((7, 12, 3), (40,), (2, 2, 5), (19, 30)),
    "of one length": ((24, 8), (32,), (10, 11, 11), (31, 1)),
}


def packed(lengths, seed: int):
    """One PackedTokens per micro-batch, of random tokens."""
    from rlhfuse.models.stage import PackedTokens

    generator = torch.Generator().manual_seed(seed)
    rows = [[torch.randint(3, 200, (n,), generator=generator).tolist() for n in row] for row in lengths]
    return tuple(PackedTokens.pack(row, torch.device("cpu")) for row in rows)


def loss_of(batches, kept: dict[int, float], tp_group):
    """Next-token loss of logits, a squared error of values; each micro-batch weighs differently. Keeps the values."""
    from rlhfuse.models.heads import token_logprobs

    def loss(out, microbatch: int):
        batch = batches[microbatch]
        real = len(batch) - batch.padding
        if out.dim() == 1:
            value = (out[:real] - batch.tokens[:real] / 200).square().sum() * (0.3 + microbatch)
        else:
            logprobs, _ = token_logprobs(out[: real - 1], batch.tokens[1:real], 200, 1.0, tp_group)
            value = -logprobs.sum() * (0.3 + microbatch)
        kept[microbatch] = float(value)
        return value

    return loss


def both_ways(rank: int, folders: dict, layout_text: str, lengths) -> dict:
    """Gradients and losses of both models by our executor and by Megatron's function, on this rank."""
    from megatron_1f1b import megatron_1f1b

    from rlhfuse.fusion.intra_stage import PipelineWork, ProgramExecutor
    from rlhfuse.fusion.p2p import Channels
    from rlhfuse.models.build import build_model
    from rlhfuse.models.stage import PipelineStage, TrainingStage
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, ModelGrid
    from rlhfuse.parallel.optimizer import ModelOptimizer
    from rlhfuse.roles import load_part, neighbour_pairs

    device = choose_device("cpu", 0, 1)
    layout = ParallelLayout.parse(layout_text)
    ranks = rank_map(layout, layout)
    maker = GroupMaker(60)
    costs = StageCosts((1,) * layout.pp, (2,) * layout.pp, (1,) * layout.pp)
    program = lower(serial_1f1b(fused_problem(layout, layout, MICROBATCHES, costs, costs)), ranks)[rank]
    built, pairs = {}, []
    for number, (role, folder) in enumerate(folders.items()):
        head, spec, grid = role == "critic", ModelSpec.from_config(folder), ModelGrid(ranks.pipelines(role))
        groups = maker.for_model(role, grid, rank)
        model = build_model(spec, grid, groups, rank, scalar_head=head, dtype=torch.float32, device=device)
        load_part(model, folder, spec, grid, rank, head)
        optimizer = ModelOptimizer(model, OptimizerConfig(), groups, device)
        pipeline, stage, _ = grid.position(rank)
        part = PipelineStage(optimizer.module, first=stage == 0, last=stage == grid.pp - 1, scalar_head=head)
        built[role] = (part, optimizer, groups, packed(lengths, 10 * number + pipeline), spec)
        pairs += neighbour_pairs(grid)
    channels = Channels(rank, maker.channels("pipeline", pairs), device.torch_device)
    channels.connect()

    def gradients(run) -> dict[str, torch.Tensor]:
        for _, optimizer, *_ in built.values():
            optimizer.zero_grad()
        run()
        found = {}
        for role, (_, optimizer, *_) in built.items():
            optimizer.finish_gradients()
            named = optimizer.module.module.named_parameters()
            found |= {f"{role}.{name}": parameter.main_grad.clone() for name, parameter in named}
        return found

    losses: dict[str, dict] = {"ours": {}, "megatron": {}}

    def ours() -> None:
        work = {}
        for role, (part, _, groups, batches, spec) in built.items():
            loss = loss_of(batches, losses["ours"].setdefault(role, {}), groups.tp)
            work[ranks.pipeline_of(role, rank)] = PipelineWork(
                TrainingStage(part), batches, loss, spec.hidden, torch.float32
            )
        ProgramExecutor(program, work, channels, lambda _: None).run()

    def megatron() -> None:
        for role, (part, _, groups, batches, _) in built.items():
            loss = loss_of(batches, losses["megatron"].setdefault(role, {}), groups.tp)
            returned = megatron_1f1b(part, batches, loss, groups, device)
            assert [float(value) for value in returned] == [
                losses["megatron"][role][m] for m in range(MICROBATCHES if part.last else 0)
            ]

    result = {"ours": gradients(ours), "megatron": gradients(megatron), "losses": losses}
    maker.close()
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "actor": write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True, num_hidden_layers=5),
        "critic": write_checkpoint(base / "critic", scalar_head=True, seed=2),
    }


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
@pytest.mark.parametrize("layout", ["d1t1p4", "d2t1p2", "d1t2p2"])
def test_gradients_equal_those_of_megatrons_own_schedule_bit_for_bit(workers, folders, layout, lengths):
    for result in workers.run(both_ways, folders, layout, lengths):
        assert result["losses"]["ours"] == result["losses"]["megatron"]
        assert result["ours"].keys() == result["megatron"].keys()
        for name, ours in result["ours"].items():
            assert ours.abs().max() > 0, f"{name}: no gradient"
            assert torch.equal(ours, result["megatron"][name]), f"{name} differs from Megatron's schedule"
