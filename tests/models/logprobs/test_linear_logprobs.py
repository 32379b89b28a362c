"""Log-probabilities and entropies from hidden states by tiles: against float64, over tensor ranks, and in memory."""

import pytest
import torch
from testkit.output_layer import HIDDEN, PADDED, ROWS, Peak, alone, drawn

POOL_RANKS = 2

SMALL = (10 * ROWS * 64, 4 * HIDDEN * 70)  # several tiles, one chunk
SMALLER = (10 * 11 * 64, 4 * HIDDEN * 11)  # several chunks, tiles of one column


def reference(vocab: int, temperature: float, dtype: torch.dtype, entropy_graph: bool) -> list[torch.Tensor]:
    """[log-probabilities, entropies, gradient of x, of the weight], in float64 from inputs rounded to `dtype`."""
    x, weight, targets, upstream = drawn(vocab)
    x, weight = (leaf.to(dtype).double().requires_grad_() for leaf in (x, weight))
    logprobs = (x @ weight[:vocab].t() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    picked = logprobs.gather(1, targets[:, None])[:, 0]
    ((picked * upstream[0]).sum() + (entropy * upstream[1]).sum() * entropy_graph).backward()
    return [picked.detach(), entropy.detach(), x.grad, weight.grad]


def ours(rank: int, world: int, vocab: int, temperature: float, dtype, entropy_graph: bool, limits, main: bool):
    """The same by tiles: the gradient of x summed over ranks, that of this rank's weight rows."""
    import torch.distributed as dist

    from rlhfuse.models.logprobs.linear_logprobs import TileLimits, VocabularyShard, linear_logprobs

    part = PADDED // world
    group = alone(rank) if world == 1 else dist.group.WORLD
    rank = dist.get_rank(group)
    x, weight, targets, upstream = drawn(vocab)
    x, weight = x.to(dtype).requires_grad_(), weight[rank * part :][:part].to(dtype).requires_grad_()
    if main:
        weight.main_grad = torch.ones(part, HIDDEN)
    shard = VocabularyShard.of(weight, vocab, group)
    limits = None if limits is None else TileLimits(*limits)
    logprobs, entropy = linear_logprobs(x, weight, targets, shard, temperature, entropy_graph, limits)
    assert entropy.requires_grad == entropy_graph and logprobs.dtype == entropy.dtype == torch.float32
    total = (logprobs * upstream[0]).sum()
    (total + (entropy * upstream[1]).sum() if entropy_graph else total).backward()
    assert not main or weight.grad is None, "the gradient would be counted twice"
    dweight = weight.main_grad - 1 if main else weight.grad
    with torch.no_grad():
        frozen, _ = linear_logprobs(x, weight, targets, shard, temperature, entropy_graph, limits)
    assert frozen.grad_fn is None and torch.equal(frozen, logprobs)
    if world > 1:
        dist.all_reduce(x.grad)
    return [logprobs.detach(), entropy.detach(), x.grad, dweight]


@pytest.mark.parametrize("limits", [None, SMALL, pytest.param(SMALLER, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "vocab, temperature, dtype, entropy_graph, main",
    [
        (200, 1.0, torch.float32, False, False),
        (200, 0.7, torch.float32, True, True),
        (208, 1.3, torch.float32, True, False),
        (100, 1.0, torch.float32, True, True),  # the second of two ranks holds padding alone
        (200, 0.7, torch.bfloat16, True, True),
        (104, 1.0, torch.bfloat16, False, False),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_values_and_gradients_against_float64(workers, world, vocab, temperature, dtype, entropy_graph, main, limits):
    expected = reference(vocab, temperature, dtype, entropy_graph)
    found = workers.run(ours, world, vocab, temperature, dtype, entropy_graph, limits, main)
    if world == 2:
        weights = torch.cat([rank[3] for rank in found])
        assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3])), "ranks disagree"
        found[0][3] = weights
    bound = 1e-5 if dtype == torch.float32 else 6e-3  # only gradients are rounded to bfloat16
    for name, got, want in zip(("logprob", "entropy", "x", "weight"), found[0], expected):
        limit = 1e-5 if name in ("logprob", "entropy") else bound
        assert (got - want).abs().max() <= limit * want.abs().max(), name
    assert not found[0][3][vocab:].any(), "padding has a gradient"


def peak_bytes(rank: int, rows: int, hidden: int, vocab: int, trains: bool) -> tuple[int, int]:
    """Most bytes beyond the inputs of a forward and a backward in bfloat16, and those of the gradient of x alone."""
    from rlhfuse.models.logprobs.linear_logprobs import VocabularyShard, linear_logprobs

    x, weight = (torch.empty(n, hidden, dtype=torch.bfloat16, device="meta") for n in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.int64, device="meta")
    weight.main_grad = torch.empty(vocab, hidden, device="meta")
    x.requires_grad_(trains)
    shard = VocabularyShard(0, vocab, alone(rank))
    with Peak(x, weight, targets, weight.main_grad) as peak, torch.set_grad_enabled(trains):
        logprobs, entropy = linear_logprobs(x, weight, targets, shard, 1.0, True)
        if trains:
            (logprobs.sum() + entropy.sum()).backward()
    return peak.peak, x.nbytes


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "rows, hidden, vocab",
    [(8192, 4096, 128256), (32768, 4096, 128256), (16384, 8192, 152064), (64, 4096, 1 << 20), (100_000, 1024, 512)],
)
def test_at_most_a_gibibyte_beyond_the_inputs(workers, rows, hidden, vocab, trains):
    peak, of_x = workers.run(peak_bytes, rows, hidden, vocab, trains)[0]
    logits = 2 * rows * vocab
    print(f"[{rows}, {hidden}] x {vocab}: {peak / 2**30:.3f} GiB (bfloat16 logits {logits / 2**30:.1f})")
    assert peak - of_x * trains <= 1 << 30
    assert peak > 1 << 20  # it does count
