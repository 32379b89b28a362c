"""A fault that one rank sees makes one number NaN, and with it the gradient norm on every rank of the model."""

import pytest
import torch
from testkit.stages import build_alone
from testkit.tiny import write_checkpoint


def poisoned(rank: int, folder, layout: str, optimizer: str) -> list[dict]:
    """Steps of zero gradients in which one rank alone has seen a fault, each rank in turn."""
    built, maker = build_alone(rank, layout, folder, name=optimizer, lr=0.0, clip_grad=0.0)
    owner = built.optimizer
    parameters = [weight for module in owner.modules.values() for weight in module.parameters()]
    before = [weight.detach().clone() for weight in parameters]
    seen = []
    for culprit in range(4):
        owner.zero_grad()
        spoiled = 0
        for stage, module in owner.modules.items():
            start, module.start_grad_sync = module.start_grad_sync, lambda: None
            owner.start_reduction(stage, torch.tensor(rank != culprit))
            spoiled += sum(int(weight.main_grad.isnan().sum()) for weight in module.parameters())
            module.start_grad_sync = start
            start()
        for stage in owner.modules:
            owner.finish_reduction(stage)
        finite = owner.step(1e-3).finite
        same = all(torch.equal(one, other.detach()) for one, other in zip(before, parameters))
        seen.append({"spoiled": spoiled, "finite": finite, "same": same})
    maker.close()
    return seen


@pytest.mark.parametrize("layout", ["d1t1p4", "d2t2p1", "d1t2p2", "d2t1p2"])
@pytest.mark.parametrize("optimizer, tied", [("adam", True), ("sgd", False)])
def test_every_rank_learns_of_it(workers, tmp_path, layout, optimizer, tied):
    folder = write_checkpoint(tmp_path / "actor", seed=1, tie_word_embeddings=tied)
    for rank, seen in enumerate(workers.run(poisoned, folder, layout, optimizer)):
        expected = [{"spoiled": int(rank == culprit), "finite": False, "same": True} for culprit in range(4)]
        assert seen == expected
