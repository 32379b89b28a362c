"""The optimizer step, by one kernel for many weights: against Megatron's own, against float64, and where it copies;
weights gathered beneath what follows it: on their way after it, whole for whoever reads or runs them."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from testkit.stages import build_alone, load, packed_for
from testkit.tiny import write_checkpoint
from testkit.writing import fill_gradients

POOL_RANKS = 2


def stepped(rank: int, folder, layout: str, name: str, clip: float, fused: bool) -> tuple:
    """(norms of three steps on made-up gradients, weights), of this rank; not `fused`: Megatron's, with plain Adam."""
    from rlhfuse.parallel.device import choose_device, fake_cuda

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
    weights = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    maker.close()
    return norms, weights


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "critic", seed=1, scalar_head=True, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "actor", seed=1, num_hidden_layers=2)


@pytest.mark.parametrize(
    "layout, name, clip",
    [("d2t1p1", "adam", 0.5), ("d1t2p1", "adam", 0.5), ("d1t2p1", "adam", 1e6), ("d2t1p1", "sgd", 0.5)],
)
def test_fused_kernels_step_as_megatrons_own(workers, folder, layout, name, clip):
    plain, fused = (workers.run(stepped, folder, layout, name, clip, on) for on in (False, True))
    for (norms, weights), (fused_norms, fused_weights) in zip(plain, fused):
        assert fused_norms == pytest.approx(norms, rel=1e-6)
        for key, weight in weights.items():
            assert (weight - fused_weights[key]).abs().max() < 1e-5, key
    assert fused[0][0] == fused[1][0], "ranks disagree on the norm"


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


def norms_at(rank: int, folder, places: tuple[int, ...], name: str) -> list[float]:
    """Norms of a model of four stages on the ranks of `places`; others have none. Gradients of stages are made up."""
    from rlhfuse.base.parallel_layout import ParallelLayout
    from rlhfuse.config.settings import OptimizerConfig
    from rlhfuse.models.build import WHOLE
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker, ModelGrid

    cells, layout = (tuple((place,) for place in places),), ParallelLayout(1, 1, len(places), chunks=4 // len(places))
    grid, maker = ModelGrid(cells, layout), GroupMaker(600)
    groups, config = maker.for_model("actor", grid, rank), OptimizerConfig(name=name)
    if rank not in places:
        return []
    model = load(rank, grid, groups, folder, False, WHOLE, config, choose_device("cpu", 0, 1)).optimizer
    found = []
    for seed in range(20):
        model.zero_grad()
        for stage, module in model.modules.items():
            generator = torch.Generator().manual_seed(10 * seed + stage)
            for weight in module.module.parameters():
                weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
        model.finish_gradients()
        found.append(model.step(None).grad_norm)
    maker.close()
    return found


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_norm_is_the_same_wherever_the_model_lies(pools, tmp_path, name):
    folder, ranks = write_checkpoint(tmp_path / "actor", seed=1, num_hidden_layers=4), pools.of(4)
    orders = (0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (3, 1)
    found = [norms for order in orders for norms in ranks.run(norms_at, folder, order, name) if norms]
    assert len(found) == 14 and all(norms == found[0] for norms in found[:12])
    assert all(norms == pytest.approx(found[0], rel=1e-6) for norms in found[12:])  # two stages a rank


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


def gathered(rank: int, folder, reader: str) -> tuple:
    """(gathers under way before and after the weights were asked for, weights).

    Rank 1 begins its gather when rank 0 has stepped and asks for weights.
    """
    built, maker = build_alone(rank, "d2t1p1", folder, head=True, name="adam")
    owner, seen, store = built.optimizer, [], dist.distributed_c10d._get_default_store()
    (batch,) = packed_for(built, [[[5, 9, 12, 3], [7, 7, 1]]])
    raw = owner._modules[0]
    under_way = lambda: [group.param_gather_handle is not None for group in raw.bucket_groups]  # noqa: E731
    raw.module.embedding.register_forward_pre_hook(lambda *_: seen.append(under_way()))

    def learn() -> None:
        owner.zero_grad()
        built.stages[0].forward(0, batch, None, lambda values, _: values.float().square().sum())
        built.stages[0].backward(0, None)
        owner.finish_gradients()

    learn()
    if reader == "no step":
        owner.step(None)
        maker.close()
        return [False], under_way(), {}
    start_gather, gone_on = owner._start_gather, f"{reader}: rank 0 has stepped"
    if rank == 1:
        owner._start_gather = lambda: (store.wait([gone_on], timedelta(seconds=540)), start_gather())
    owner.step(1e-2)
    before = under_way()
    store.set(gone_on, f"by rank {rank}")
    owner._start_gather = start_gather
    if reader == "forward":
        learn()
        assert len(seen) == 2 and not any(seen[1]), "a layer ran before its weights were there"
    weights = {name: weight.detach().clone() for name, weight in owner.modules[0].named_parameters()}
    after = under_way()
    if reader == "forward":
        for _ in range(2):  # steps on, with nothing in between
            owner.step(1e-2)
            owner.finish_gradients()
        weights = {name: weight.detach().clone() for name, weight in owner.module.named_parameters()}
    maker.close()
    return before, after, weights


@pytest.mark.parametrize("reader", ["forward", "modules"])
def test_a_gather_waits_for_nobody_and_its_reader_for_all(workers, critic, reader):
    """Were the step to wait for the other rank's gather, neither would end."""
    (before, after, weights), (_, _, others) = workers.run(gathered, critic, reader)
    assert all(before) and not any(after)
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_step_that_is_left_out_gathers_nothing(workers, critic):
    assert all(not any(after) for _, after, _ in workers.run(gathered, critic, "no step"))
