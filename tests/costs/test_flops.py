"""Model FLOPs against sums made by hand for a small decoder."""

from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.flops import IterationFlops, forward_flops
from rlhfuse.tasks.role import LEARNERS, ROLES

SPEC = ModelSpec("llama", layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, mlp=16, vocab=10, context=64)
# A layer: query and output 8 x 8, key and value 8 x 4, gate, up and down 8 x 16, two norms of 8.
LAYER = 2 * 64 + 2 * 32 + 3 * 128 + 16
BODY = 2 * LAYER + 8  # the final norm too; not the embedding


def test_a_forward_by_hand():
    # Lengths 3 and 2: 3 + 2 + 1 and 2 + 1 pairs, for each of which a head takes 4 products and sums, twice over.
    attention = 2 * 4 * (2 * 4) * (6 + 3)
    assert forward_flops(SPEC, [3, 2], outputs=5) == 2 * BODY * 5 + 2 * 80 * 5 + attention
    assert forward_flops(SPEC, [3, 2], outputs=2) == 2 * BODY * 5 + 2 * 80 * 2 + attention
    assert forward_flops(SPEC, [3, 2], outputs=5, scalar_head=True) == 2 * BODY * 5 + 2 * 8 * 5 + attention
    assert forward_flops(SPEC, [], outputs=0) == 0


def test_tied_embeddings_compute_as_much_and_biases_as_much_as_they_hold():
    tied = ModelSpec(**{**SPEC.__dict__, "tied_embeddings": True})
    assert tied.parameters() < SPEC.parameters()
    assert forward_flops(tied, [5], 5) == forward_flops(SPEC, [5], 5)
    biased = ModelSpec(**{**SPEC.__dict__, "qkv_bias": True, "proj_bias": True})
    assert biased.parameters() - SPEC.parameters() == 2 * (8 + 4 + 4 + 8)  # of q, k, v and output, in two layers
    assert forward_flops(biased, [5], 5) - forward_flops(SPEC, [5], 5) == 2 * 5 * 2 * 24


def test_an_iteration_by_hand():
    """Prompts of 2 and 1 tokens, responses of 3 and 1: training takes three forwards, and here goes over them twice."""
    lengths = [(2, 3), (1, 1)]
    specs = dict.fromkeys(ROLES, SPEC)
    made = IterationFlops.of(specs, LEARNERS, ROLES[1:], lengths, 2 * lengths)
    language, scalar = forward_flops(SPEC, [5, 2], 4), forward_flops(SPEC, [5, 2], 4, scalar_head=True)
    assert made.generation == forward_flops(SPEC, [4, 1], outputs=4)  # the last token of a response is not read
    assert made.inference == language + 2 * scalar
    assert made.training == {"actor": 6 * language, "critic": 6 * scalar}
    assert made.total == made.generation + made.inference + 6 * (language + scalar)
    fewer = IterationFlops.of(specs, ROLES[:1], ROLES[1:], lengths, lengths[1:])
    assert fewer.training == {"actor": 3 * forward_flops(SPEC, [2], 1)} and fewer.inference == made.inference
