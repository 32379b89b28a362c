"""Weights come from a checkpoint into any training layout, from there into the generation layout, and back to a
checkpoint, bit for bit: unequal layers per stage, chunks, tensor ranks, tied embeddings, sequence parallelism. What
is sent is what was predicted from the layouts alone, on nodes of two, and no more than must go from node to node."""

import os
from collections import deque
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from testkit.stages import build, copy_for, ranks_of
from testkit.tiny import write_checkpoint

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.layout_moves import MoveLoad
from rlhfuse.decisions.weight_holders import WeightHolders
from rlhfuse.decisions.weight_moves import plan_moves
from rlhfuse.schedule.ir.ranks import plain_cells

NODE = 2  # ranks of a pretended node


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "actor": write_checkpoint(base / "actor", seed=1, num_hidden_layers=5, model_type="qwen2"),
        "tied": write_checkpoint(
            base / "tied", seed=2, num_hidden_layers=5, tie_word_embeddings=True, attention_bias=True
        ),
        "critic": write_checkpoint(base / "critic", seed=3, num_hidden_layers=5, scalar_head=True, model_type="phi3"),
    }


def there_and_back(
    rank: int, role: str, folder, layout: str, generation: str, sequence_parallel: bool, out, beneath: bool
) -> dict:
    """Layers on this rank, and what arrived in the `generation` layout beside what a checkpoint puts there.

    Rank 0 writes the checkpoint `out`, weight by weight from the ranks that train it.
    """
    from rlhfuse.base.clock import Clock
    from rlhfuse.models.build import Activations
    from rlhfuse.models.hf import hf_tensors
    from rlhfuse.models.hf_folder import export_checkpoint
    from rlhfuse.parallel.background import Background
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker
    from rlhfuse.parallel.reshard import Resharder
    from rlhfuse.parallel.whole_weights import WholeWeights
    from rlhfuse.run.rank_models import load_part

    ranks, maker, device = ranks_of(**{role: layout}), GroupMaker(600), choose_device("cpu", 0, 1)
    built = build(rank, maker, ranks, role, folder, Activations(sequence_parallel))
    spec = built.spec
    (arrived, grid), (wanted, _) = (copy_for(rank, maker, spec, generation, built.head) for _ in range(2))
    with torch.no_grad():
        for parameter in arrived.parameters():
            parameter.fill_(torch.nan)
    load_part(wanted, folder, spec, grid, rank, built.head)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(NODE)):
        resharder = Resharder(device, 20_000, maker.group("moves", tuple(range(4))))
    sent, exchange = {True: 0, False: 0}, dist.batch_isend_irecv  # to another node, or within the own one

    def counted(operations: list[dist.P2POp]) -> list[dist.Work]:
        for one in operations:
            sent[one.peer // NODE != rank // NODE] += one.tensor.nbytes if one.op is dist.isend else 0
        return exchange(operations)

    chunks, sides = [*built.optimizer.modules.values()], predicted(role, folder, layout, generation)
    if beneath:  # the rank's own work, into memory that the module does not keep
        route = resharder.route(chunks, arrived, *sides, lasting=True)
        memory = {name: weight.data for name, weight in arrived.named_parameters()}
        for weight in arrived.parameters():
            weight.data = torch.empty(0)
        with patch.object(dist, "batch_isend_irecv", counted):
            work = Background(partial(resharder.move, route), "weight-mover", device.torch_device, Clock())
            for _ in range(20):
                dist.all_reduce(torch.ones(1000))
            work.wait()
        for name, weight in arrived.named_parameters():
            weight.data = memory[name]
    else:
        resharder.reshard(chunks, arrived, *sides)
        with patch.object(dist, "batch_isend_irecv", counted):
            resharder.reshard(chunks, arrived, *sides)  # by the plan of the first time
    weights = WholeWeights(built.optimizer.modules.values())
    tensors = hf_tensors(weights, spec, built.head)
    if rank == 0:
        export_checkpoint(tensors, built.head, folder, out)
    else:
        name, without_values = next(tensors)
        assert without_values.is_meta, f"{name} came to a rank that has no use for it"
        deque(tensors, maxlen=0)
    layers = built.grid.layout.stage_layers(spec.layers)
    result = {
        "layers": [layers[stage] for stage in built.stages],
        "numbers": [
            [layer.layer_number - 1 for layer in module.module.decoder.layers]
            for module in built.optimizer.modules.values()
        ],
        "pairs": {
            name: (arrived.get_parameter(name).detach(), parameter.detach())
            for name, parameter in wanted.named_parameters()
        },
        "sent": sent,
    }
    maker.close()
    return result


@pytest.mark.parametrize(
    "name, layout, generation, sequence_parallel",
    [
        ("actor", "d2t1p2", "d2t2p1", False),
        ("actor", "d1t1p4", "d4t1p1", False),
        ("actor", "d1t1p4:1,1,1,2", "d2t2p1", False),
        ("tied", "d2t1p2v2:1,1,2,1", "d2t2p1", False),
        pytest.param("tied", "d1t1p4", "d2t2p1", False, marks=pytest.mark.slow),
        ("tied", "d1t2p2v2", "d4t1p1", True),
        ("actor", "d2t1p2v2", "d2t2p1", False),
        ("critic", "d1t2p2", "d4t1p1", True),
        pytest.param("critic", "d2t1p2v2", "d4t1p1", False, marks=pytest.mark.slow),
    ],
)
def test_weights_arrive_bit_for_bit(workers, folders, tmp_path, name, layout, generation, sequence_parallel):
    role, out = ("critic" if name == "critic" else "actor"), tmp_path / "exported"
    more = role == "critic"  # which moves beneath generation
    results = workers.run(there_and_back, role, folders[name], layout, generation, sequence_parallel, out, more)
    held = [layer for result in results for layers in result["layers"] for layer in layers]
    assert set(held) == set(range(5)) and len({held.count(layer) for layer in range(5)}) == 1
    for result in results:
        assert result["numbers"] == [list(layers) for layers in result["layers"]]
        for parameter, (arrived, wanted) in result["pairs"].items():
            assert torch.equal(arrived, wanted), f"{parameter} is not what the checkpoint holds"
    across, within = (sum(result["sent"][far] for result in results) for far in (True, False))
    moves = plan_moves(*predicted(role, folders[name], layout, generation), NODE)
    traffic = MoveLoad.of(moves, NODE).traffic
    assert (traffic.across, traffic.within) == (across, within) and across == moves.minimum_across
    before, after = (load_file(folder / "model.safetensors") for folder in (folders[name], out))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def predicted(role, folder, layout, generation):
    """Holders in both layouts by their text alone."""
    spec, ranks, wanted = ModelSpec.from_config(folder), ranks_of(**{role: layout}), ParallelLayout.parse(generation)
    return (
        WeightHolders.of_layout(spec, ParallelLayout.parse(layout), ranks.pipelines(role), 4, role == "critic"),
        WeightHolders.of_layout(spec, wanted, plain_cells(wanted), 4, role == "critic"),
    )
