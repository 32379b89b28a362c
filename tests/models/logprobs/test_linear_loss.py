"""Gradients of the loss made in the forward: against the two-pass way and float64, in products, and in memory."""

import pytest
import torch
from testkit.output_layer import HIDDEN, PADDED, ROWS, Peak, alone, drawn
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


def token_loss(upstream, entropy_graph: bool):
    """Not linear: a derivative that is taken elsewhere is another."""

    def loss(logprobs, entropy, rows):
        total = (upstream[0, rows].to(logprobs.dtype) * logprobs.sin()).sum()
        return total + (upstream[1, rows].to(logprobs.dtype) * entropy.square()).sum() if entropy_graph else total

    return loss


def reference(vocab: int, temperature: float, dtype: torch.dtype, entropy_graph: bool) -> list[torch.Tensor]:
    """[loss, gradient of x, of the weight] in float64."""
    x, weight, targets, upstream = drawn(vocab)
    x, weight = (leaf.to(dtype).double().requires_grad_() for leaf in (x, weight))
    logprobs = (x @ weight[:vocab].t() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    loss = token_loss(upstream, entropy_graph)(logprobs.gather(1, targets[:, None])[:, 0], entropy, slice(None))
    loss.backward()
    return [loss.detach(), x.grad, weight.grad]


def ours(rank: int, world: int, vocab: int, temperature: float, dtype, entropy_graph: bool, limits):
    """By both ways: [loss, gradient of x summed over ranks, of this rank's weight rows, products]."""
    import torch.distributed as dist

    from rlhfuse.models.logprobs.linear_logprobs import VocabularyShard, linear_logprobs
    from rlhfuse.models.logprobs.linear_loss import LinearLoss

    part = PADDED // world
    group = alone(rank) if world == 1 else dist.group.WORLD
    found = []
    for once in (True, False):
        x, weight, targets, upstream = drawn(vocab)
        x, weight = x.to(dtype).requires_grad_(), weight[dist.get_rank(group) * part :][:part].to(dtype)
        weight.main_grad = torch.ones(part, HIDDEN)
        shard = VocabularyShard.of(weight, vocab, group)
        loss = token_loss(upstream, entropy_graph)
        with Products() as products:
            if once:
                work = LinearLoss(loss, weight, targets, shard, temperature, entropy_graph, limits)
                total = work.of(x, weight.main_grad)
            else:
                total = loss(*linear_logprobs(x, weight, targets, shard, temperature, entropy_graph), slice(None))
            total.backward()
        if world > 1:
            dist.all_reduce(x.grad)
        found.append([total.detach(), x.grad, weight.main_grad - 1, products.count])
    return found


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
def test_gradients_in_the_forward(workers, world, vocab, temperature, dtype, entropy_graph, limits):
    expected = reference(vocab, temperature, dtype, entropy_graph)
    ranks = workers.run(ours, world, vocab, temperature, dtype, entropy_graph, limits)
    bound = 1e-5 if dtype == torch.float32 else 6e-3
    for way in (0, 1):
        weights = torch.cat([rank[way][2] for rank in ranks]) if world == 2 else ranks[0][way][2]
        got = [*ranks[0][way][:2], weights]
        for name, value, want, limit in zip(("loss", "x", "weight"), got, expected, (1e-5, bound, bound)):
            assert (value - want).abs().max() <= limit * want.abs().max(), (way, name)
        assert not weights[vocab:].any(), "padding has a gradient"
    columns = [min(max(vocab - rank * PADDED // world, 0), PADDED // world) for rank in range(world)]
    for rank, many in zip(ranks, columns):
        assert [way[3] / (ROWS * HIDDEN) for way in rank] == [3 * many, 4 * many], "6 THV, and 8"


def peak_bytes(rank: int, rows: int, hidden: int, vocab: int) -> tuple[int, int]:
    """Most bytes beyond the inputs, and those of the gradient of x, which stays for the backward."""
    from rlhfuse.models.logprobs.linear_logprobs import VocabularyShard
    from rlhfuse.models.logprobs.linear_loss import LinearLoss

    x, weight = (torch.empty(n, hidden, device="meta") for n in (rows, vocab))
    targets, total = torch.zeros(rows, dtype=torch.int64, device="meta"), torch.empty(vocab, hidden, device="meta")
    shard = VocabularyShard(0, vocab, alone(rank))
    work = LinearLoss(lambda logprobs, entropy, _: (logprobs + entropy).sum(), weight, targets, shard, 1.0, True)
    with Peak(x, weight, targets, total) as peak:
        work.of(x.requires_grad_(), total).backward()
    return peak.peak, x.nbytes


@pytest.mark.parametrize("rows, hidden, vocab", [(8192, 4096, 128256), (32768, 4096, 128256), (64, 4096, 1 << 20)])
def test_a_gibibyte_of_logits_and_gradients(workers, rows, hidden, vocab):
    """Of torch's formulas half as much more: they have 12 bytes a logit where Triton's kernels have 8."""
    peak, of_x = workers.run(peak_bytes, rows, hidden, vocab)[0]
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
