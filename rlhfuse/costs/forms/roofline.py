"""The roofline of one model (paper section 6) as numbers, from which seconds follow.

The functions run as they stand and inside of compiled kernels, with the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

from numba.extending import register_jitable

from rlhfuse.costs.forms.collectives import ring_all_reduce_seconds


class Roofline(NamedTuple):
    """One replica of a model; FLOPs, bytes and floors are of a layer."""

    layers: float
    flops_per_token: float
    flops_per_pair: float  # (query, key)
    flop_rate: float
    weight_bytes: float
    kv_bytes: float  # per token of context
    byte_rate: float
    in_turns: float  # 1: launching, computing and moving add up; 0: one hides the others
    floor: float  # seconds of a forward
    decode_floor: float  # seconds that a decode step has beside its work
    moved_per_token: float  # bytes between the products
    bandwidth: float
    message_bytes: float  # per token, of an all-reduce
    ranks: float  # that it sums over
    link: float  # bytes/s
    sum_start: float  # seconds of an all-reduce beside its message
    head_flops: float  # per output
    head_moving: float  # seconds in which the output layer's weights are read
    share: float = 1.0  # least part of an instance's batch that one replica takes
    outputs_per_token: float = 0.0  # of such a batch
    outputs_per_sequence: float = 1.0
    passed: float = 0.0  # seconds of a forward beside its layers
    half_rate_tokens: float = 0.0  # of a forward, at which products reach half of `flop_rate`
    decode_share: float = 1.0  # of `flop_rate`, what products of a decode step reach
    kind: int = 0


@register_jitable(error_model="numpy", _nrt=False)
def both(roofline, computing, moving):
    """Seconds of computing and moving that belong together."""
    return computing + moving if roofline.in_turns else max(computing, moving)


@register_jitable(error_model="numpy", _nrt=False)
def moved_seconds(roofline, tokens):
    """What the kernels of a layer's forward move beside its products."""
    return tokens * roofline.moved_per_token / roofline.bandwidth


@register_jitable(error_model="numpy", _nrt=False)
def layer_seconds(roofline, tokens, sequences):
    """One layer's forward over `tokens` tokens of `sequences` equal sequences."""
    causal_pairs = tokens * (tokens / max(sequences, 1.0) + 1) / 2
    flops = roofline.flops_per_token * (tokens + roofline.half_rate_tokens) + roofline.flops_per_pair * causal_pairs
    moved = roofline.weight_bytes + roofline.kv_bytes * tokens
    products = both(roofline, both(roofline, flops / roofline.flop_rate, moved / roofline.byte_rate), roofline.floor)
    summing = ring_all_reduce_seconds(tokens * roofline.message_bytes, roofline.ranks, roofline.link)
    return products + moved_seconds(roofline, tokens) + 2 * (summing + roofline.sum_start)


@register_jitable(error_model="numpy", _nrt=False)
def head_seconds(roofline, outputs):
    """The output layer for `outputs` tokens; a scalar head is free."""
    return both(roofline, roofline.head_flops * outputs / roofline.flop_rate, roofline.head_moving)


@register_jitable(error_model="numpy", _nrt=False)
def forward_seconds(roofline, tokens, sequences, outputs):
    """Forward over packed sequences, `outputs` of whose tokens go through the output layer."""
    if tokens <= 0:
        return 0.0
    layers = roofline.layers * layer_seconds(roofline, tokens, sequences)
    return layers + head_seconds(roofline, outputs) + roofline.passed


@register_jitable(error_model="numpy", _nrt=False)
def decode_layer_seconds(roofline, batch, context_tokens, all_reduce):
    """One layer of a decode step, whose sums take `all_reduce` seconds: products, then every new token's attention to
    its own context."""
    computing = roofline.flops_per_token * batch / (roofline.flop_rate * roofline.decode_share)
    attending = roofline.flops_per_pair * context_tokens / roofline.flop_rate
    products = both(roofline, computing, roofline.weight_bytes / roofline.byte_rate)
    attention = both(roofline, attending, roofline.kv_bytes * context_tokens / roofline.byte_rate)
    return roofline.decode_floor + products + attention + all_reduce
