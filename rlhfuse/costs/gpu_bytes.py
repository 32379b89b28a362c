"""What a layer and the loss hold on a GPU, in bytes of one rank: flash attention, fused norms and SwiGLU, tiles.

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
    """While the MLP of a stage's last layer runs back: gradients of its output, and of gate and up."""
    return tokens * (hidden + 2 * spec.mlp / tp) * element


def passing_in_loss(spec: ModelSpec, tokens: float, tp: int, element: int, backward: bool = True) -> float:
    """Of log-probabilities by tiles: one of them; back, the float32 sums of a chunk of rows and of a tile's weights,
    and gradients of the rows and of all hidden states."""
    rows = min(tokens, LINE_BYTES // (4 * spec.hidden))
    columns = min(TILE_BYTES / (TILE_ELEMENT_BYTES * rows), LINE_BYTES // (4 * spec.hidden), spec.vocab / tp)
    if not backward:
        return rows * columns * 8
    sums = 4 * spec.hidden * (rows + max(rows, columns))
    return rows * columns * TILE_ELEMENT_BYTES + sums + 2 * tokens * spec.hidden * element
