"""All decoder layers of a pipeline stage as one autograd function, whose backward is written out.

A layer is a list of plain calls: no module and no autograd node is between them. Weights' gradients are added to
`main_grad` at once, or later where the backward is split. Under sequence parallelism hidden states between the products
are a tensor rank's part of the rows: T counts those or all tokens. Letters as in torch_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfuse.config.values import Recompute
from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.stack.torch_ops import TorchOps


class Linear(NamedTuple):
    """A linear layer of one tensor rank: weight [N, K] and bias [N], if any; frozen ones get no gradient."""

    weight: Tensor
    bias: Tensor | None = None


class Mlp(NamedTuple):
    """The MLP of a layer, without its norm and the sum over tensor ranks; other MLPs implement these methods."""

    fc1: Linear
    fc2: Linear

    def forward(self, x: Tensor, ops: TorchOps, remade: bool) -> tuple[Tensor, list[Tensor | None]]:
        """(this tensor rank's part of the output [T, C], what `backward` needs, less what it makes again)."""
        gate_up = ops.linear(x, self.fc1.weight)
        y = ops.swiglu(gate_up)
        return ops.linear(y, self.fc2.weight), [gate_up, None if remade else y]

    def backward(
        self, gradient: Tensor, saved: list[Any], ops: TorchOps, product: Callable[[Linear, Tensor, Tensor], None]
    ) -> tuple[Linear, Tensor]:
        """(the linear layer that took x, the gradient of its output), of that of the output; empties `saved`.

        `product` takes linear layers with the gradients of their outputs and their inputs.
        """
        y, gate_up = saved.pop(), saved.pop()
        by_gate_up, y = ops.swiglu_backward(gate_up, torch.mm(gradient, self.fc2.weight), y)
        del gate_up
        product(self.fc2, gradient, y)
        return self.fc1, by_gate_up


class FlatLayer(NamedTuple):
    """One decoder layer as references to its weights, which Megatron's modules hold under their names."""

    input_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None  # [D] each, of queries and keys
    proj: Linear
    mlp_norm: Tensor
    mlp: Mlp

    @staticmethod
    def of(layer: Any) -> FlatLayer:
        """Those of Megatron's TransformerLayer."""
        attention, mlp = layer.self_attention, layer.mlp
        queries, keys = attention.q_layernorm, attention.k_layernorm
        norms = (queries.weight, keys.weight) if hasattr(queries, "weight") else None
        qkv, proj = (Linear(one.weight, one.bias) for one in (attention.linear_qkv, attention.linear_proj))
        halves = Mlp(Linear(mlp.linear_fc1.weight), Linear(mlp.linear_fc2.weight))
        return FlatLayer(layer.input_layernorm.weight, qkv, norms, proj, layer.pre_mlp_layernorm.weight, halves)


class KeptAttention(NamedTuple):
    """Activations that the attention half of a layer keeps; `normed` is None under selective recomputation."""

    x: Tensor  # [T, C] the residual stream that comes in
    normed: Tensor | None
    norm: Any
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Any
    out: Tensor
    attended: Any


class KeptMlp(NamedTuple):
    """Activations that the MLP half keeps."""

    x: Tensor
    normed: Tensor | None
    norm: Any
    inner: list[Any]


class Product(NamedTuple):
    """The gradient of a weight [N, K] that is still to be computed: gradient [T, N]^T @ x [T, K]."""

    weight: Tensor
    gradient: Tensor
    x: Tensor
    cut: bool  # x is this tensor rank's part of the rows


class FlatStack(torch.nn.Module):
    """Stands for Megatron's TransformerBlock, whose layers it holds. `group`: tensor ranks; `cut`: sequence parallel.

    While `deferred` is a list, backwards leave their products there for `add`. Biases and norms are small, and their
    gradients are never put off.
    """

    def __init__(self, block: Any, ops: TorchOps, recompute: Recompute, group: dist.ProcessGroup, cut: bool) -> None:
        super().__init__()
        self.layers, self.final_layernorm = block.layers, block.final_layernorm
        self.flat = tuple(FlatLayer.of(layer) for layer in block.layers)
        self.ops, self.recompute = ops, recompute
        self.input_tensor: Tensor | None = None
        self._group, self._ranks = (group, group.size()) if group.size() > 1 else (None, 1)
        self._cut = cut and self._group is not None
        self.deferred: list[Product] | None = None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Set what the stage before gave, which `forward` then takes; Megatron's name."""
        self.input_tensor = input_tensor

    def forward(self, hidden_states: Tensor | None, *, packed_seq_params: SequenceBorders, **_: Any) -> Tensor:
        """[T, 1, C] -> [T, 1, C], on the last stage normed; Megatron's arguments, of which all others are unused."""
        x: Any = self.input_tensor if hidden_states is None else hidden_states
        if torch.is_grad_enabled():
            return _Stack.apply(x, self, packed_seq_params)  # pyright: ignore[reportReturnType]
        return self.run(x, packed_seq_params, None)

    def run(self, x_T1C: Tensor, sequences: SequenceBorders, kept: list[Any] | None) -> Tensor:
        """The layers without a graph; `kept` gets what `pull` needs."""
        batch, full = self.ops.batch(sequences), self.recompute == "full"
        stream: list[Any] = [x_T1C.view(-1, x_T1C.shape[-1]), None]
        for layer in self.flat:
            if kept is not None and full:
                stream = [_added(stream), None]
                kept.append(stream[0])
            stream = self._layer(layer, stream, batch, None if full else kept)
        if self.final_layernorm is None:
            return _added([part.view(x_T1C.shape) for part in stream])  # no view, which autograd would watch
        x, normed, norm = self.ops.norm(stream.pop(0), stream.pop(), None, self.final_layernorm.weight)
        if kept is not None:
            kept.append((x, norm))
        return normed.view(x_T1C.shape)

    def _layer(self, layer: FlatLayer, stream: list[Any], batch: Any, kept: list[Any] | None) -> list[Any]:
        """[the residual stream before the MLP, the MLP's part of it], of those before [T, C], which it takes out."""
        stream = self._attention(layer, stream, batch, kept)
        ops, remade = self.ops, self.recompute == "selective"
        x, normed, norm = ops.norm(stream.pop(0), stream.pop(), layer.proj.bias, layer.mlp_norm)
        out, inner = layer.mlp.forward(self._whole(normed), ops, remade)
        if kept is not None:
            kept.append(KeptMlp(x, None if remade else normed, norm, inner))
        return [x, self._summed(out)]

    def _attention(self, layer: FlatLayer, stream: list[Any], batch: Any, kept: list[Any] | None) -> list[Any]:
        ops = self.ops
        x, normed, norm = ops.norm(stream.pop(0), stream.pop(), None, layer.input_norm)
        q, k, v, heads = ops.split(ops.linear(self._whole(normed), *layer.qkv), layer.head_norms, batch)
        out, attended = ops.attend(q, k, v, batch)
        if kept is not None:
            normed = None if self.recompute == "selective" else normed
            kept.append(KeptAttention(x, normed, norm, q, k, v, heads, out, attended))
        return [x, self._summed(ops.linear(out, layer.proj.weight))]

    def pull(self, gradient_T1C: Tensor, sequences: SequenceBorders, kept: list[Any]) -> Tensor:
        """The gradient of `run`'s input, of that of its output; empties `kept`."""
        d = gradient_T1C.contiguous().view(-1, gradient_T1C.shape[-1])  # kernels take rows that follow one another
        batch = self.ops.batch(sequences)
        if self.final_layernorm is not None:
            x, norm = kept.pop()
            d = self.ops.norm_backward(d, x, self.final_layernorm.weight, norm, None)
            del x
        for layer in reversed(self.flat):
            if self.recompute == "full":
                self._layer(layer, [kept.pop(), None], batch, kept)
            d = self._mlp_backward(layer, d, kept.pop())
            d = self._attention_backward(layer, d, kept, batch)
        return d.view(gradient_T1C.shape)

    def _mlp_backward(self, layer: FlatLayer, d: Tensor, kept: KeptMlp) -> Tensor:
        linear, gradient = layer.mlp.backward(self._whole(d), kept.inner, self.ops, self._product)
        return self._input_backward(d, kept, layer.mlp_norm, linear, gradient)

    def _attention_backward(self, layer: FlatLayer, d: Tensor, all_kept: list[Any], batch: Any) -> Tensor:
        ops, kept, proj = self.ops, KeptAttention(*all_kept.pop()), layer.proj
        if proj.bias is not None and proj.bias.requires_grad:  # added to rows that are cut as d is
            ops.add_rows(proj.bias, d)
        whole = self._whole(d)
        self._product(Linear(proj.weight), whole, kept.out)
        inputs = kept.q, kept.k, kept.v, kept.out, kept.attended
        gradients = ops.attend_backward(torch.mm(whole, proj.weight), *inputs, batch)
        heads, rest = kept.heads, KeptMlp(kept.x, kept.normed, kept.norm, [])
        del whole, inputs, kept  # nothing needs the other parts any more
        gradient = ops.join(gradients, heads, layer.head_norms, batch)
        del gradients, heads
        return self._input_backward(d, rest, layer.input_norm, layer.qkv, gradient)

    def _input_backward(self, d: Tensor, kept: KeptMlp, norm: Tensor, linear: Linear, gradient: Tensor) -> Tensor:
        """d and the gradient that comes back through a linear layer, which is cut by its outputs, and its norm."""
        x, normed, saved, _ = kept
        if normed is None:
            normed = self.ops.norm(x, None, None, norm)[1]
        cut = self._cut and self.deferred is not None
        gathering = self._start_gather(normed, not cut)
        summing = self._start_sum(torch.mm(gradient, linear.weight))
        self._product(linear, gradient, _done(*gathering), cut)
        del gradient, gathering, normed
        return self.ops.norm_backward(_done(*summing), x, norm, saved, d)

    def _product(self, linear: Linear, gradient: Tensor, x: Tensor, cut: bool = False) -> None:
        """The gradients of a linear layer's weight and bias, of that of its output [T, N] and of its input [T, K]."""
        if linear.bias is not None and linear.bias.requires_grad:
            self.ops.add_rows(linear.bias, gradient)
        if not linear.weight.requires_grad:
            return
        if self.deferred is None:
            self.ops.add_product(linear.weight, gradient, x)
        else:
            self.deferred.append(Product(linear.weight, gradient, x, cut))

    @torch.no_grad()
    def add(self, products: list[Product]) -> None:
        """The rest of a split backward; empties `products`. Rows of the next are gathered meanwhile."""
        following: Any = self._start_gather(products[0].x, products[0].cut) if products else None
        while products:
            (weight, gradient, _, _), x = products.pop(0), _done(*following)
            following = self._start_gather(products[0].x, products[0].cut) if products else None
            self.ops.add_product(weight, gradient, x)

    def _whole(self, x: Tensor) -> Tensor:
        """The rows of all tensor ranks, where they are cut."""
        return _done(*self._start_gather(x))

    def _start_gather(self, x: Tensor, cut: bool = True) -> tuple[Tensor, Any]:
        if not (cut and self._cut):
            return x, None
        whole = x.new_empty(len(x) * self._ranks, x.shape[1])
        return whole, dist.all_gather_into_tensor(whole, x, group=self._group, async_op=True)

    def _summed(self, x: Tensor) -> Tensor:
        """The sum over tensor ranks of x [T, C], cut where rows are."""
        return _done(*self._start_sum(x))

    def _start_sum(self, x: Tensor) -> tuple[Tensor, Any]:
        if self._group is None:
            return x, None
        if not self._cut:
            return x, dist.all_reduce(x, group=self._group, async_op=True)
        total = x.new_empty(len(x) // self._ranks, x.shape[1])
        return total, dist.reduce_scatter_tensor(total, x, group=self._group, async_op=True)


def _added(stream: list[Any]) -> Tensor:
    x, delta = stream
    return x if delta is None else x + delta


def _done(tensor: Tensor, work: Any) -> Tensor:
    if work is not None:
        work.wait()
    return tensor


class _Stack(torch.autograd.Function):
    """No weight is an input: autograd would make a gradient for each, and Megatron's hooks wait for them."""

    @staticmethod
    def forward(ctx: Any, x_T1C: Tensor, stack: FlatStack, sequences: SequenceBorders) -> Tensor:
        ctx.stack, ctx.sequences, ctx.kept = stack, sequences, []
        return stack.run(x_T1C, sequences, ctx.kept)

    @staticmethod
    def backward(ctx: Any, gradient_T1C: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.stack.pull(gradient_T1C, ctx.sequences, ctx.kept), None, None
