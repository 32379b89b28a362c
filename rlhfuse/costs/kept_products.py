"""What a split backward keeps of a layer from B to W: input and output gradient of its four linear layers."""

from __future__ import annotations

from rlhfuse.config.spec import ModelSpec


def kept_by_layer(spec: ModelSpec, tokens: float, tp: int, hidden: float, element: int) -> float:
    """Bytes of one rank; `hidden`: elements per token of a hidden state there, its part under sequence parallelism.

    Of the layers cut by outputs (qkv, fc1) the input as it was kept and the part of the output's gradient; of those cut
    by inputs (proj, fc2) the part of the input and the whole gradient of the output.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inputs = 2 * hidden + (queries + spec.mlp) / tp
    gradients = (queries + 2 * keys + 2 * spec.mlp) / tp + 2 * spec.hidden
    return tokens * (inputs + gradients) * element
