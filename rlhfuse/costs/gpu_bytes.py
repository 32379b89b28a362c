"""Bytes of one rank that a layer and the loss hold: on a GPU with flash attention, fused norms and SwiGLU, tiles; of a
split backward on CPUs too.

T tokens, e bytes of an element, H hidden (cut over tp under sequence parallelism), the rest cut over tp: A the query
heads' elements, K the key heads', W the MLP's width, V the vocabulary.
"""

from __future__ import annotations

from rlhfuse.config.spec import ModelSpec

TILE_BYTES = 512 << 20  # of the loss: a tile of logits and what its gradient is made of
LINE_BYTES = 128 << 20  # of each float32 sum of its gradients
TILE_ELEMENT_BYTES = 10


def kept_by_layer(spec: ModelSpec, tokens: float, tp: int, hidden: float, element: int) -> float:
    """From a layer's forward to its backward.

    Both norms' inputs and outputs with one float32 a row; query, key and value joined, query and key once more after
    the rotation, attention's output and one float32 a row and head; gate and up, and their product.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    cut = ((3 * queries + 3 * keys + 3 * spec.mlp) * element + 4 * spec.heads) / tp
    return tokens * (4 * hidden * element + 2 * 4 * hidden / spec.hidden + cut)


def passing_in_backward(spec: ModelSpec, tokens: float, tp: int, hidden: float, element: int) -> float:
    """While the MLP of a stage's last layer runs back, beside the gradient of its output: gradients of the product
    and the second weights; of the product, gate and up; of gate and up, the first weights and their input, which no
    longer need gate, up and product. Gradients of what tensor ranks multiply are whole on each; under sequence
    parallelism that of the input also as this rank's part."""
    width, whole = spec.mlp / tp, spec.hidden
    second = tokens * (width + whole - hidden) + width * whole
    inner = tokens * 2 * width
    first = tokens * (whole - width + (hidden if hidden < whole else 0)) + 2 * width * whole
    return (tokens * hidden + max(second, inner, first)) * element


def prefilling_bytes(spec: ModelSpec, tokens: float, tp: int, element: int) -> float:
    """A layer of the engine: query, key and value joined, the rotated query, gate and up, and their product; with
    what was there before the layer and the product of that before, or with the normed input and the output."""
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    cut = (2 * queries + 2 * keys + 3 * spec.mlp) / tp
    return tokens * (2 * spec.hidden + cut + max(spec.mlp / tp, spec.hidden)) * element


def scoring_bytes(spec: ModelSpec, tokens: float, tp: int, element: int) -> float:
    """A layer that only scores: embeddings, its input, both norms' outputs and attention's sum; with gate, up and
    their product, or with its output before and after it is added."""
    return tokens * (5 * spec.hidden + max(3 * spec.mlp / tp, 2 * spec.hidden)) * element


def passing_in_embedding(spec: ModelSpec, tokens: float, tp: int, element: int) -> float:
    """While the embedding runs back: gradients of its output, whole on each tensor rank, and of all of the table."""
    return (tokens * spec.hidden + spec.embedding_parameters / tp) * element


def passing_in_loss(spec: ModelSpec, tokens: float, tp: int, element: int, backward: bool = True) -> float:
    """Bytes of log-probabilities by tiles: one tile; backwards, the float32 sum of a chunk of rows, to which products
    add, and gradients of the rows and of all hidden states."""
    rows = min(tokens, LINE_BYTES // (4 * spec.hidden))
    columns = min(TILE_BYTES / (TILE_ELEMENT_BYTES * rows), LINE_BYTES // (4 * spec.hidden), spec.vocab / tp)
    if not backward:
        return rows * columns * 8
    return rows * columns * TILE_ELEMENT_BYTES + 4 * spec.hidden * rows + 2 * tokens * spec.hidden * element


def kept_by_split_layer(spec: ModelSpec, tokens: float, tp: int, hidden: float, element: int) -> float:
    """What a split backward keeps of a layer from B to W: input and output gradient of its four linear layers.

    `hidden`: elements per token of a hidden state there, its part under sequence parallelism. Of the layers cut by
    outputs (qkv, fc1) the input as it was kept and the part of the output's gradient; of those cut by inputs (proj,
    fc2) the part of the input and the whole gradient of the output.
    """
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    inputs = 2 * hidden + (queries + spec.mlp) / tp
    gradients = (queries + 2 * keys + 2 * spec.mlp) / tp + 2 * spec.hidden
    return tokens * (inputs + gradients) * element
