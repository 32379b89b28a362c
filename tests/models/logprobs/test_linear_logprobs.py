"""Log-probabilities and entropies from hidden states by rows: against float64, over tensor ranks, and in memory."""

import pytest
import torch
from testkit.output_layer import PADDED, Peak, alone, drawn, softmax_outputs

POOL_RANKS = 2


def ours(rank: int, world: int, vocab: int, temperature: float, dtype, most_bytes: int) -> torch.Tensor:
    import torch.distributed as dist

    from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard

    part = PADDED // world
    group = alone(rank) if world == 1 else dist.group.WORLD
    x, weight, targets, _ = drawn(vocab)
    weight = weight[dist.get_rank(group) * part :][:part].to(dtype)
    shard = VocabularyShard.of(weight, vocab, group)
    found = LinearLogprobs(weight, targets, shard, temperature, most_bytes).of(x.to(dtype).requires_grad_())
    assert not found.requires_grad and found.dtype == torch.float32
    return found


@pytest.mark.parametrize("most_bytes", [1 << 28, 4 * PADDED * 5])
@pytest.mark.parametrize(
    "vocab, temperature, dtype",
    [
        (200, 0.7, torch.float32),
        (208, 1.3, torch.float32),
        (100, 1.0, torch.float32),  # the second of two ranks holds padding alone
        (200, 0.7, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_values_against_float64(workers, world, vocab, temperature, dtype, most_bytes):
    x, weight, targets, _ = drawn(vocab)
    expected = softmax_outputs(x.to(dtype).double(), weight.to(dtype).double(), targets, vocab, temperature)
    found = workers.run(ours, world, vocab, temperature, dtype, most_bytes)
    assert all(torch.equal(found[0], other) for other in found[1:]), "ranks disagree"
    for name, got, want in zip(("logprob", "entropy"), found[0], expected):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), name


def peak_bytes(rank: int, rows: int, hidden: int, vocab: int) -> int:
    """Most bytes beyond the inputs."""
    from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard

    x, weight = (torch.empty(n, hidden, device="meta") for n in (rows, vocab))
    targets = torch.zeros(rows, dtype=torch.int64, device="meta")
    with Peak(x, weight, targets) as peak:
        LinearLogprobs(weight, targets, VocabularyShard(0, vocab, alone(rank)), 1.0).of(x)
    return peak.peak


@pytest.mark.parametrize(
    "rows, hidden, vocab", [(32768, 4096, 128256), (16384, 8192, 152064), (64, 4096, 1 << 20), (100_000, 1024, 512)]
)
def test_a_quarter_of_a_gibibyte_of_logits(workers, rows, hidden, vocab):
    """Torch's formulas have 12 bytes a logit where Triton's kernels have 4."""
    peak = workers.run(peak_bytes, rows, hidden, vocab)[0]
    print(f"[{rows}, {hidden}] x {vocab}: {peak / 2**30:.3f} GiB")
    assert 1 << 26 < peak <= (3 << 28) + (16 << 20)
