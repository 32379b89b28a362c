"""What layers are made of, on the device: Triton kernels, tiles of logits, added products, fused Adam."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from gpu_checks.bench import DTYPES, Bench
from gpu_checks.result import TOLERANCE, relative, require
from gpu_checks.training import LR, OneRank

from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.build import layer_ops
from rlhfuse.models.layers import decode_layer
from rlhfuse.models.logprobs.linear_logprobs import LinearLogprobs, VocabularyShard
from rlhfuse.models.logprobs.linear_loss import LinearLoss
from rlhfuse.models.stack.torch_ops import HeadShape, TorchOps
from rlhfuse.parallel.device import current_device_is_cpu, fake_cuda
from rlhfuse.parallel.weight_gradients import add_product

EPS = 1e-5


def check_training_kernels(bench: Bench, kind: str) -> dict:
    """All operations of a training layer, forward and backward, against torch in float64."""
    dtype, lengths = DTYPES[kind], (5, 1, 64, 130)
    shape, hidden, mlp = (HeadShape(32, 8, 128), 4096, 14336) if bench.on_gpu else (HeadShape(4, 2, 16), 64, 80)
    angles = torch.outer(torch.arange(max(lengths)).double(), 0.1 ** (torch.arange(shape.dim // 2) / shape.dim))

    def results(where: torch.device, wide: torch.dtype, ops_of: Callable[[Any], TorchOps]) -> dict[str, torch.Tensor]:
        tables = tuple(table.float().to(where) for table in (angles.cos(), angles.sin()))
        ops, generator = ops_of(SimpleNamespace(up_to=lambda length: tables)), torch.Generator().manual_seed(11)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype).to(where, wide)

        def weight(size: int) -> Any:
            drawn: Any = torch.nn.Parameter(1 + draw(size) / 8)
            drawn.main_grad = torch.zeros_like(drawn, dtype=torch.promote_types(wide, torch.float32))
            return drawn

        tokens, found = sum(lengths), {}
        width = (shape.heads + 2 * shape.groups) * shape.dim
        norm, *heads = (weight(size) for size in (hidden, shape.dim, shape.dim))
        batch = ops.batch(SequenceBorders.of(lengths, where))
        total, found["norm"], scales = ops.norm(draw(tokens, hidden), draw(tokens, hidden), draw(hidden), norm)
        found["residual"] = total
        found["norm_gradient"] = ops.norm_backward(draw(tokens, hidden), total, norm, scales, draw(tokens, hidden))
        q, k, v, saved = ops.split(draw(tokens, width), (heads[0], heads[1]), batch)
        found["attention"], attended = ops.attend(q, k, v, batch)
        upstream = draw(tokens, shape.heads * shape.dim)
        gradients = ops.attend_backward(upstream, q, k, v, found["attention"], attended, batch)
        found["heads_gradient"] = ops.join(gradients, saved, (heads[0], heads[1]), batch)
        gate_up = draw(tokens, 2 * mlp)
        found["swiglu_gradient"], found["swiglu"] = ops.swiglu_backward(gate_up, draw(tokens, mlp), None)
        return found | {f"weight_{n}": one.main_grad for n, one in enumerate((norm, *heads))}

    with torch.no_grad():
        there = results(bench.where, dtype, lambda tables: layer_ops(tables, shape, EPS, dtype, bench.where))
        torchs = torch.device("cuda")  # whose operations do not round to float32
        here = results(torch.device("cpu"), torch.float64, lambda tables: TorchOps(tables, shape, EPS, torchs))
    errors = {name: relative(there[name], wanted) for name, wanted in here.items()}
    return require(max(errors.values()) < TOLERANCE[dtype], errors)


def check_linear_logprobs(bench: Bench, kind: str) -> dict:
    """Log-probability, entropy, loss and gradients by rows of logits against the whole matrix in float64."""
    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(9)
    rows, hidden, vocab, padded = (700, 512, 32000, 32064) if bench.on_gpu else (20, 32, 180, 192)
    x = torch.randn(rows, hidden, generator=generator).to(dtype)
    weight = (torch.randn(padded, hidden, generator=generator) * hidden**-0.5).to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    here = [t.double().requires_grad_(True) for t in (x, weight)]
    there = [t.to(bench.where) for t in (x, weight, targets, torch.zeros(weight.shape))]
    logs = (here[0] @ here[1][:vocab].t() / 0.7).log_softmax(-1)
    wanted = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    with bench.one_rank():
        assert dist.group.WORLD is not None, "a process group has just been made"
        shard = VocabularyShard.of(there[1], vocab, dist.group.WORLD)
        softmax = LinearLogprobs(there[1], there[2], shard, 0.7, rows // 3 * 4 * padded)
        found = softmax.of(there[0])
        loss = lambda logprobs, entropy, rows: logprobs.sum() + 0.1 * entropy.square().sum()  # noqa: E731
        made = LinearLoss(loss, softmax, True, most_bytes=rows * 2 * padded).of(there[0].requires_grad_(True), there[3])
        made.backward()
    exact = loss(*wanted, slice(None))
    exact.backward()
    pairs = (*zip(found, wanted), (made, exact), (there[0].grad, here[0].grad), (there[3], here[1].grad))
    errors = {name: relative(*pair) for name, pair in zip(("logprobs", "entropy", "loss", "dx", "dweight"), pairs)}
    return require(max(errors.values()) < TOLERANCE[dtype], errors)


def check_layer_kernels(bench: Bench, kind: str) -> dict:
    """Residual and norm, and heads with their cache places, of a decode step against torch's operations here."""
    kernels, dtype, generator = decode_layer.layer_kernels(True), DTYPES[kind], torch.Generator().manual_seed(12)
    tokens, size, groups, per_group, dim = (200, 4096, 8, 4, 128) if bench.on_gpu else (5, 64, 2, 2, 16)
    x, delta, qkv = (
        torch.randn(tokens, n, generator=generator).to(dtype) for n in (size, size, groups * (per_group + 2) * dim)
    )
    bias, weight, *norms = (1 + torch.randn(n, generator=generator).to(dtype) for n in (size, size, dim, dim))
    angles = torch.outer(torch.arange(300).float(), 0.1 ** (torch.arange(dim // 2) / dim))
    positions = torch.randint(0, 300, (tokens,), generator=generator)
    slots = torch.randperm(2 * tokens, generator=generator)[:tokens]
    cache = torch.zeros(2, -(-2 * tokens // 16), 16, groups, dim, dtype=dtype)
    errors = {}

    def both(function: str, *tensors: Any) -> tuple[Any, Any]:
        def moved(where: torch.device | str) -> list[Any]:
            return [
                [t.clone().to(where) for t in one] if isinstance(one, (list, tuple)) else
                one.clone().to(where) if torch.is_tensor(one) else one
                for one in tensors
            ]  # fmt: skip

        ours, theirs = moved(bench.where), moved("cpu")
        return (getattr(kernels, function)(*ours), ours), (getattr(decode_layer, function)(*theirs), theirs)

    for name, added in (("norm", (None, None)), ("add_norm", (delta, None)), ("add_bias_norm", (delta, bias))):
        (found, ours), (wanted, theirs) = both("add_norm", x, *added, weight, EPS)
        errors[name], errors[f"{name}_residual"] = relative(found, wanted), relative(ours[0], theirs[0])
    for name, weights in (("heads", None), ("normed_heads", norms)):
        rest = EPS, (angles.cos(), angles.sin()), (positions, slots), (cache[0], cache[1])
        (found, ours), (wanted, theirs) = both("place_heads", qkv, weights, *rest)
        errors[name] = max(relative(found, wanted), *(relative(a, b) for a, b in zip(ours[-1], theirs[-1])))
    return require(max(errors.values()) < TOLERANCE[dtype] / 2, errors)


def check_accumulation(bench: Bench, kind: str) -> dict:
    """Products that add to float32 gradients: against float64, and two equal micro-batches against one, twice."""
    dtype, generator = DTYPES[kind], torch.Generator().manual_seed(14)
    tokens, outputs, inputs = (4096, 1024, 768) if bench.on_gpu else (40, 24, 16)
    gradient, x = (torch.randn(tokens, n, generator=generator).to(dtype) for n in (outputs, inputs))
    total = torch.randn(outputs + 8, inputs, generator=generator)
    there = total.to(bench.where).clone()
    add_product(there[8:], gradient.to(bench.where).t(), x.to(bench.where))
    errors = {"product": relative(there[8:], total[8:].double() + gradient.double().t() @ x.double())}
    assert torch.equal(there[:8].cpu(), total[:8])
    with bench.one_rank():
        rank = OneRank(bench.tiny(), bench.device, dtype)
        runs = []
        for count in (1, 2):
            rank.optimizer.zero_grad()
            for _ in range(count):
                _run(rank, bench)
            runs.append(rank.gradients())
    errors["twice"] = max(relative(twice, 2 * runs[0][name]) for name, twice in runs[1].items())
    return require(errors["product"] < 1e-4 and errors["twice"] < TOLERANCE[dtype], errors)


def _run(rank: OneRank, bench: Bench) -> None:
    if bench.on_gpu:
        rank.forward_backward()
        return
    with current_device_is_cpu():
        rank.forward_backward()


def check_fused_adam(bench: Bench) -> dict:
    """Three steps of one kernel for many weights against Megatron's with torch's plain Adam."""
    with bench.one_rank():
        model = bench.tiny()
        plain, fused = (_adam_steps(bench, model, on) for on in (False, True))
    errors = {"norms": max(abs(a / b - 1) for a, b in zip(fused[0], plain[0]))}
    errors["weights"] = max(relative(weight, plain[1][name]) for name, weight in fused[1].items())
    return require(max(errors.values()) < 1e-5, errors)


def _adam_steps(bench: Bench, model: Path, fused: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norms, and weights after made-up gradients, some of them clipped."""
    rank = OneRank(model, bench.device, torch.float32)
    megatrons = rank.optimizer.optimizer
    for group in megatrons.param_groups:
        group["fused"], group["lr"] = fused, LR
    norms = []
    for seed in range(3):
        rank.optimizer.zero_grad()
        weights: list[Any] = list(rank.model.parameters())
        for weight in weights:
            generator = torch.Generator().manual_seed(1000 * seed + weight.numel())
            weight.main_grad.copy_(0.1**seed * torch.randn(weight.shape, generator=generator))
        rank.optimizer.finish_gradients()
        if fused:
            norms.append(rank.optimizer.step(LR).grad_norm)
        else:
            with fake_cuda(bench.device):
                norms.append(megatrons.step()[1])
    named = dict(rank.optimizer.module.named_parameters())
    return norms, {name: weight.detach().cpu().clone() for name, weight in named.items()}
