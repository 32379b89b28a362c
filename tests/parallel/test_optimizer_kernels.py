"""The optimizer step as CUDA does it, by one kernel for many weights, against Megatron's own; torch has both on CPU."""

from __future__ import annotations

import pytest
import torch
from gloo import Workers
from stages import load, ranks_of
from tiny import write_checkpoint

from rlhfuse.config.settings import OptimizerConfig


@pytest.fixture(scope="module")
def workers():
    pool = Workers(2)
    yield pool
    pool.close()


def stepped(rank: int, folder, layout: str, name: str, clip: float, fused: bool, resume: bool) -> tuple:
    """(norms of three steps on made-up gradients, weights, whether torch's optimizer is fused), of this rank."""
    from rlhfuse.models.build import WHOLE
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, ModelGrid
    from rlhfuse.parallel.optimizer_state import export_state, import_state

    ranks, maker = ranks_of(actor=layout), GroupMaker(600)
    grid = ModelGrid(ranks.pipelines("actor"), 1)
    config = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1, clip_grad=clip)
    groups = maker.for_model("actor", grid, rank)
    model = load(rank, grid, groups, folder, False, WHOLE, config, choose_device("cpu", 0, 1)).optimizer
    if fused:
        model.use_fused_kernels()
    norms = []
    for seed in range(3):
        model.zero_grad()
        for number, parameter in enumerate(model.module.parameters()):
            own = rank if getattr(parameter, "tensor_model_parallel", False) else 0
            generator = torch.Generator().manual_seed(10_000 * seed + 100 * own + number)
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        model.finish_gradients()
        norms.append(model.step(1e-2).grad_norm)
        if resume and seed == 1:  # what was saved comes back in the middle
            kept = {one.name: one.to_host() for one in export_state(model)}
            for parameter in model.module.parameters():
                parameter.data.zero_()
            import_state(model, lambda name, kind, _: kept[name].tensors[kind].clone(), lambda name: kept[name].step)
    flags = [bool(group.get("fused")) for group in model.optimizer.param_groups]
    weights = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    maker.close()
    return norms, weights, flags


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "actor", seed=1, num_hidden_layers=2)


@pytest.mark.parametrize(
    "layout, name, clip",
    [("d2t1p1", "adam", 0.5), ("d1t2p1", "adam", 0.5), ("d1t2p1", "adam", 1e6), ("d2t1p1", "sgd", 0.5)],
)
def test_fused_kernels_step_as_megatrons_own(workers, folder, layout, name, clip):
    plain, fused = (workers.run(stepped, folder, layout, name, clip, on, False) for on in (False, True))
    for (norms, weights, _), (fused_norms, fused_weights, flags) in zip(plain, fused):
        assert all(flags) == (name == "adam") and fused_norms == pytest.approx(norms, rel=1e-6)
        for key, weight in weights.items():
            assert (weight - fused_weights[key]).abs().max() < 1e-5, key
    assert fused[0][0] == fused[1][0], "ranks disagree on the norm"


def test_a_resumed_fused_adam_goes_on_bit_for_bit(workers, folder):
    once, again = (workers.run(stepped, folder, "d1t1p2", "adam", 0.5, True, resume) for resume in (False, True))
    for (norms, weights, _), (resumed_norms, resumed, _) in zip(once, again):
        assert norms == resumed_norms and all(torch.equal(weight, resumed[key]) for key, weight in weights.items())
