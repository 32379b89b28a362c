"""The optimizer step, by one kernel for many weights: against Megatron's own, against float64, and where it copies."""

from __future__ import annotations

import pytest
import torch
from testkit.stages import build_alone
from testkit.tiny import write_checkpoint
from testkit.writing import fill_gradients

POOL_RANKS = 2


def stepped(rank: int, folder, layout: str, name: str, clip: float, fused: bool, resume: bool) -> tuple:
    """(norms of three steps on made-up gradients, weights), of this rank; not `fused`: Megatron's, with plain Adam."""
    from rlhfuse.parallel.device import choose_device, fake_cuda
    from rlhfuse.parallel.optimizer_state import export_state, import_state

    built, maker = build_alone(rank, layout, folder, name=name, weight_decay=0.1, clip_grad=clip)
    model, device = built.optimizer, choose_device("cpu", 0, 1)
    assert all(group.get("fused") for group in model.optimizer.param_groups) == (name == "adam")
    norms = []
    for seed in range(3):
        model.zero_grad()
        fill_gradients(rank, model, seed)
        model.finish_gradients()
        if fused:
            norms.append(model.step(1e-2).grad_norm)
        else:
            for group in model.optimizer.param_groups:
                group["fused"], group["lr"] = False, 1e-2
            with fake_cuda(device):
                norms.append(model.optimizer.step()[1])
                if name == "adam":
                    model._start_gather()
        if resume and seed == 1:  # what was saved comes back in the middle
            kept = {one.name: one.to_host() for one in export_state(model)}
            for parameter in model.module.parameters():
                parameter.data.zero_()
            import_state(model, lambda name, kind, _: kept[name].tensors[kind].clone(), lambda name: kept[name].step)
    weights = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    maker.close()
    return norms, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "actor", seed=1, num_hidden_layers=2)


@pytest.mark.parametrize(
    "layout, name, clip",
    [("d2t1p1", "adam", 0.5), ("d1t2p1", "adam", 0.5), ("d1t2p1", "adam", 1e6), ("d2t1p1", "sgd", 0.5)],
)
def test_fused_kernels_step_as_megatrons_own(workers, folder, layout, name, clip):
    plain, fused = (workers.run(stepped, folder, layout, name, clip, on, False) for on in (False, True))
    for (norms, weights), (fused_norms, fused_weights) in zip(plain, fused):
        assert fused_norms == pytest.approx(norms, rel=1e-6)
        for key, weight in weights.items():
            assert (weight - fused_weights[key]).abs().max() < 1e-5, key
    assert fused[0][0] == fused[1][0], "ranks disagree on the norm"


def test_a_resumed_fused_adam_goes_on_bit_for_bit(workers, folder):
    once, again = (workers.run(stepped, folder, "d1t1p2", "adam", 0.5, True, resume) for resume in (False, True))
    for (norms, weights), (resumed_norms, resumed) in zip(once, again):
        assert norms == resumed_norms and all(torch.equal(weight, resumed[key]) for key, weight in weights.items())


def adam(cuts: list[int], dtype: torch.dtype, fused: bool) -> tuple[torch.Tensor, ...]:
    """(weights, moments) after six steps of Adam as it is set up here, on parts of one vector that end at `cuts`."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda: torch.randn(cuts[-1], generator=generator)  # noqa: E731
    whole = 0.02 * draw()
    parts = [torch.nn.Parameter(whole[a:b].to(dtype)) for a, b in zip([0, *cuts], cuts)]
    optimizer = torch.optim.AdamW(parts, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for group in optimizer.param_groups:
        group["fused"] = fused
    for step in range(6):
        gradient = 0.1**step * draw() * draw()
        for part, a, b in zip(parts, [0, *cuts], cuts):
            part.grad = gradient[a:b].to(dtype)
        optimizer.step()
    moments = (torch.cat([optimizer.state[part][kind] for part in parts]) for kind in ("exp_avg", "exp_avg_sq"))
    return torch.cat([part.detach() for part in parts]), *moments


def test_the_fused_kernel_is_as_exact_as_the_plain_one():
    n = 64 * 1000 + 7
    reference = adam([n], torch.float64, fused=False)
    plain, fused = (adam([n], torch.float32, on) for on in (False, True))
    for exact, one, other in zip(reference, plain, fused):
        error, fused_error = ((value - exact).square().mean().sqrt() for value in (one, other))
        assert 0 < fused_error <= 1.01 * error


def test_shards_of_a_weight_step_as_the_whole_bit_for_bit():
    """Megatron lets weights and their data-parallel shards begin at multiples of 64 elements."""
    n = 64 * 1000 + 7
    whole = adam([n], torch.float32, fused=True)
    for cuts in ([64, n], [64 * 7, 64 * 500, 64 * 777, n], [*range(64, n, 64), n]):
        assert all(torch.equal(one, other) for one, other in zip(whole, adam(cuts, torch.float32, fused=True)))


def copies(rank: int, folder, layout: str) -> tuple[bool, bool, list[str]]:
    """(Adam's gradients are those of the backward, its weights the model's; collectives of a step) of one rank."""
    built, maker = build_alone(rank, layout, folder, name="adam")
    model = built.optimizer
    model.zero_grad()
    with torch.profiler.profile() as profile:
        model.finish_gradients()
        model.step(1e-2)
        model._finish_gathers()
    named = {event.name for event in profile.events() if event.name.startswith("gloo:")}
    (part,) = model._parts()
    inside = lambda values, buffers: all(any(_within(one, all_) for all_ in buffers) for one in values)  # noqa: E731
    gradients = inside([one.grad for one in part.get_parameters()], [b.grad_data for b in model._buffers()])
    weights = inside(part.get_parameters(), [b.param_data for b in model._buffers()])
    maker.close()
    return gradients, weights, sorted(named)


def _within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return 0 <= part.data_ptr() - whole.data_ptr() < whole.nbytes


@pytest.mark.parametrize("layout, replicated", [("d1t1p2", False), ("d2t1p1", True)])
def test_nothing_is_copied_and_one_replica_sums_nothing(workers, folder, layout, replicated):
    for gradients, weights, collectives in workers.run(copies, folder, layout):
        assert gradients and weights
        others = [name for name in collectives if "all_reduce" not in name]
        assert bool(others) == replicated and len(collectives) > len(others), collectives
