"""Calls of the flat stack's kernels as functions that autograd differentiates, to be held against others."""

from types import SimpleNamespace

import torch

from rlhfuse.models.build import layer_ops
from rlhfuse.models.stack.torch_ops import HeadShape


def attention(q, k, v, rotary, sequences):
    """Packed attention [T, H, D] of q [T, H, D], k and v [T, G, D], turned by the tables `rotary`; differentiable."""
    tables = SimpleNamespace(up_to=lambda length: rotary)
    ops = layer_ops(tables, HeadShape(q.shape[1], k.shape[1], q.shape[2]), 1e-5, q.dtype, q.device)
    return _Attention.apply(q, k, v, ops, sequences)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ops, sequences):
        ctx.ops, ctx.batch = ops, ops.batch(sequences)
        *ctx.turned, _ = ops.split(ops.joined(q, k, v), None, ctx.batch)
        out, ctx.saved = ops.attend(*ctx.turned, ctx.batch)
        ctx.out = out
        return out.view(q.shape).clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().view(ctx.out.shape)
        gradients = ctx.ops.attend_backward(gradient, *ctx.turned, ctx.out, ctx.saved, ctx.batch)
        return *ctx.ops.heads_of(ctx.ops.join(gradients, None, None, ctx.batch)), None, None


def rms_norm(x, weight, eps):
    """The CPU's norm in float32, of x [..., C] and weight [C]; differentiable."""
    return _Norm.apply(x, weight, layer_ops(None, HeadShape(1, 1, 2), eps, x.dtype, x.device))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ops):
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        _, normed, ctx.scales = ops.norm(rows, None, None, weight)
        ctx.rows, ctx.weight, ctx.ops = rows, weight.detach().requires_grad_(), ops
        return normed.view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad = torch.zeros_like(ctx.weight)
        flat = gradient.reshape(ctx.rows.shape).contiguous()
        dx = ctx.ops.norm_backward(flat, ctx.rows, ctx.weight, ctx.scales, None)
        return dx.view(gradient.shape), ctx.weight.main_grad, None
