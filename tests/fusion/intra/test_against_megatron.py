"""Our serial 1F1B against Megatron-core's own schedule function: the same stages, batches and losses, the same bits."""

import pytest
import torch
from testkit.stages import LENGTHS, build, loss_of, one_step, packed_for, random_rows, ranks_of
from testkit.tiny import write_checkpoint

SAME_LENGTH = ((24, 8), (32,), (10, 11, 11), (31, 1))


def both_ways(rank: int, folders: dict, layout: str, lengths, sequence_parallel: bool) -> dict:
    """Gradients and losses of both models by our executor and by Megatron's function, on this rank."""
    from megatron_1f1b import megatron_1f1b, with_pipeline_group

    from rlhfuse.models.build import Activations
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker

    ranks, maker = ranks_of(actor=layout, critic=layout), GroupMaker(600)
    models = {
        role: build(rank, maker, ranks, role, folder, Activations(sequence_parallel))
        for role, folder in folders.items()
    }
    rows = {
        role: [random_rows(lengths, 10 * number + pipeline) for pipeline in range(built.grid.layout.dp)]
        for number, (role, built) in enumerate(models.items())
    }

    def gradients() -> dict:
        return {(role, *key): value for role, built in models.items() for key, value in built.gradients().items()}

    ours_losses = one_step(rank, maker, ranks, models, rows)
    ours, losses = gradients(), {}
    for role, built in models.items():
        built.optimizer.zero_grad()
        batches = packed_for(built, rows[role][built.grid.position(rank)[0]])
        (stage,) = built.stages.values()
        loss = loss_of(batches, losses.setdefault(role, {}))
        groups = with_pipeline_group(built.groups, maker, role, built.grid, rank)
        returned = megatron_1f1b(stage.stage, batches, loss, groups, choose_device("cpu", 0, 1))
        assert [float(value) for value in returned] == list(losses[role].values())
        built.optimizer.finish_gradients()
    result = {"ours": ours, "megatron": gradients(), "losses": (ours_losses, losses)}
    maker.close()
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "actor": write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True, num_hidden_layers=5),
        "critic": write_checkpoint(base / "critic", scalar_head=True, seed=2),
    }


@pytest.mark.parametrize(
    "layout, lengths, sequence_parallel",
    [
        ("d1t1p4", LENGTHS, False),
        ("d1t1p4", SAME_LENGTH, False),
        ("d2t1p2", LENGTHS, False),
        ("d1t2p2", LENGTHS, False),
        ("d1t2p2", LENGTHS, True),
    ],
    ids=["p4", "p4-one-length", "d2p2", "t2p2", "t2p2-sequence-parallel"],
)
def test_gradients_equal_those_of_megatrons_own_schedule_bit_for_bit(
    workers, folders, layout, lengths, sequence_parallel
):
    for result in workers.run(both_ways, folders, layout, lengths, sequence_parallel):
        ours, megatron = result["losses"]
        assert ours == megatron
        assert result["ours"].keys() == result["megatron"].keys()
        for name, gradient in result["ours"].items():
            assert gradient.abs().max() > 0, f"{name}: no gradient"
            assert torch.equal(gradient, result["megatron"][name]), f"{name} differs from Megatron's schedule"
