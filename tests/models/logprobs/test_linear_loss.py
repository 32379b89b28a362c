"""Gradients of the loss made in the forward: against float64, in products, and in memory."""

import pytest
import torch
from testkit.output_layer import HIDDEN, PADDED, ROWS, Peak, alone, drawn, softmax_outputs
from testkit.tiny import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

POOL_RANKS = 2


class Products(TorchDispatchMode):
    """Multiplications of matrix products under it."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = (arg for arg in args[-2:])
            self.count += a.shape[0] * a.shape[1] * b.shape[1]
        return made


def loss_of(upstream, entropy_graph: bool, by_token: bool):
    """Not linear: a derivative that is taken elsewhere is another. Not `by_token` it is of means of 13 rows."""

    def loss(logprobs, entropy, rows):
        weights = upstream[:, rows].to(logprobs.dtype)
        means = (
            logprobs if by_token else torch.stack([part.mean() for part in logprobs.split(13)]).repeat_interleave(13)
        )
        total = (weights[0] * means[: len(logprobs)].sin()).sum()
        return total + (weights[1] * entropy.square()).sum() if entropy_graph else total

    return loss


def reference(vocab: int, temperature: float, dtype: torch.dtype, *how: bool) -> list[torch.Tensor]:
    """[loss, gradient of x, of the weight] in float64."""
    x, weight, targets, upstream = drawn(vocab)
    x, weight = (leaf.to(dtype).double().requires_grad_() for leaf in (x, weight))
    loss = loss_of(upstream, *how)(*softmax_outputs(x, weight, targets, vocab, temperature), slice(None))
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


def ours(rank: int, world: int, vocab: int, temperature: float, dtype, how: tuple[bool, bool], limits: tuple[int, int]):
    """[loss, gradient of x summed over ranks, of this rank's weight rows, products]."""
    import torch.distributed as dist

    from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard
    from rlhfuse.models.logprobs.linear_loss import LinearLoss

    part = PADDED // world
    group = alone(rank) if world == 1 else dist.group.WORLD
    x, weight, targets, upstream = drawn(vocab)
    x, weight = x.to(dtype).requires_grad_(), weight[dist.get_rank(group) * part :][:part].to(dtype)
    total, shard = torch.ones(part, HIDDEN), VocabularyShard.of(weight, vocab, group)
    softmax = LinearLogprobs(weight, targets, shard, temperature, limits[0])
    with Products() as products:
        loss = LinearLoss(loss_of(upstream, *how), softmax, *how, limits[1]).of(x, total)
        loss.backward()
    if world > 1:
        dist.all_reduce(x.grad)
    return [loss.detach(), x.grad, total - 1, products.count]


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("limits", [(1 << 30, 1 << 30), (4 * PADDED * 5, 4 * PADDED * 12)])
@pytest.mark.parametrize(
    "vocab, temperature, dtype, entropy_graph",
    [
        (200, 1.0, torch.float32, False),
        (208, 0.7, torch.float32, True),
        (100, 1.3, torch.float32, True),  # the second of two ranks holds padding alone
        (200, 0.7, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_in_the_forward(workers, world, vocab, temperature, dtype, entropy_graph, limits, by_token):
    how = entropy_graph, by_token
    expected = reference(vocab, temperature, dtype, *how)
    ranks = workers.run(ours, world, vocab, temperature, dtype, how, limits)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    weights = torch.cat([rank[2] for rank in ranks[:world]])
    got = [*ranks[0][:2], weights]
    for name, value, want, limit in zip(("loss", "x", "weight"), got, expected, (1e-5, bound, bound)):
        assert (value - want).abs().max() <= limit * want.abs().max(), name
    assert not weights[vocab:].any(), "padding has a gradient"
    for number, rank in enumerate(ranks[:world]):
        columns = min(max(vocab - number * PADDED // world, 0), PADDED // world)
        assert rank[3] == (3 if by_token else 4) * ROWS * HIDDEN * columns, "6 THV, or 8"


def peak_bytes(rank: int, rows: int, hidden: int, vocab: int, by_token: bool) -> tuple[int, int]:
    """Most bytes beyond the inputs, and those of the gradient of x, which stays for the backward."""
    from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard
    from rlhfuse.models.logprobs.linear_loss import LinearLoss

    x, weight = (torch.empty(n, hidden, device="meta") for n in (rows, vocab))
    targets, total = torch.zeros(rows, dtype=torch.int64, device="meta"), torch.empty(vocab, hidden, device="meta")
    softmax = LinearLogprobs(weight, targets, VocabularyShard(0, vocab, alone(rank)), 1.0)
    work = LinearLoss(lambda logprobs, entropy, _: (logprobs + entropy).sum(), softmax, True, by_token)
    with Peak(x, weight, targets, total) as peak:
        work.of(x.requires_grad_(), total).backward()
    return peak.peak, x.nbytes


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("rows, hidden, vocab", [(8192, 4096, 128256), (32768, 4096, 128256), (64, 4096, 1 << 20)])
def test_a_gibibyte_of_logits_and_gradients(workers, rows, hidden, vocab, by_token):
    """By torch's formulas half as much more: they have 12 bytes a logit where Triton's kernels have 4."""
    peak, of_x = workers.run(peak_bytes, rows, hidden, vocab, by_token)[0]
    print(f"[{rows}, {hidden}] x {vocab}: {(peak - of_x) / 2**30:.3f} GiB")
    assert 1 << 28 < peak - of_x <= (3 << 29) + (64 << 20)


def both_orders(rank: int, folder) -> tuple[bool, list[dict]]:
    """Gradients of a tied model of one stage with backwards at once and at the end, after a step that was given up."""
    from unittest.mock import patch

    from testkit.stages import LENGTHS, build, loss_of, packed_for, random_rows, ranks_of

    from rlhfuse.models import heads
    from rlhfuse.models.build import WHOLE
    from rlhfuse.parallel.groups import GroupMaker

    maker = GroupMaker(600)
    built, found = build(rank, maker, ranks_of(actor="d2t1p1"), "actor", folder, WHOLE), []
    (stage,), optimizer = built.stages.values(), built.optimizer
    batches = packed_for(built, random_rows(LENGTHS, 7))
    loss = loss_of(batches, {})
    with patch.object(heads, "by_tiles", lambda device: True):
        for late in (False, True):
            optimizer.zero_grad()
            stage.forward(9, batches[0], None, lambda out, _: loss(out, 0))  # its backward never comes
            optimizer.zero_grad()
            for number, batch in enumerate(batches):
                stage.forward(number, batch, None, loss)
                if not late:
                    stage.backward(number, None)
            for number in range(len(batches) * late):
                stage.backward(number, None)
            optimizer.finish_gradients()
            found.append(built.gradients())
    maker.close()
    return all(
        weight.head_grad is None for weight in stage.stage.model.parameters() if hasattr(weight, "head_grad")
    ), found


def test_the_order_of_forwards_and_backwards_changes_no_bit_of_a_tied_weight(workers, tmp_path):
    folder = write_checkpoint(tmp_path, model_type="qwen2", num_hidden_layers=1, tie_word_embeddings=True)
    for freed, (soon, late) in workers.run(both_orders, folder):
        assert freed and all(torch.equal(gradient, late[name]) for name, gradient in soon.items())
