"""Sequence parallelism and recomputation change where activations live, and no gradient; chunks change nothing.

Gradients are held against the whole model in float64 by transformers, one sequence at a time, to 1e-6 of the largest
element of each tensor; padding, packing, tensor ranks, stages and chunks all lie between the two.
"""

import functools
import gc
import random
from contextlib import nullcontext
from typing import get_args
from unittest.mock import patch

import pytest
import torch
from testkit.stages import LENGTHS, build, one_step, packed_for, random_rows, ranks_of, write_reference_gradients
from testkit.tiny import write_checkpoint

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import Recompute
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.models import heads

TOLERANCE = 2e-6
MODES = get_args(Recompute)
MODELS = {
    "llama": dict(model_type="llama", num_hidden_layers=5, num_key_value_heads=4),
    "tied qwen2": dict(model_type="qwen2", num_hidden_layers=5, tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", num_hidden_layers=5, num_key_value_heads=4),
    "critic": dict(model_type="llama", num_hidden_layers=5, scalar_head=True),
    "phi3": dict(model_type="phi3", num_hidden_layers=5, pad_token_id=None),
    "biased": dict(model_type="llama", num_hidden_layers=5, attention_bias=True),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """name -> (role, checkpoint, folder of its gradients, losses)."""
    base = tmp_path_factory.mktemp("models")

    @functools.cache
    def reference(name: str) -> tuple:
        # weights as small as freshly initialised ones: with larger ones float32 alone is off by more than TOLERANCE
        folder = write_checkpoint(base / name, seed=list(MODELS).index(name), scale=0.1, **MODELS[name])
        gradients, head = base / f"{name} gradients", "scalar_head" in MODELS[name]
        losses = write_reference_gradients(folder, gradients, head, random_rows(LENGTHS, 7))
        return "critic" if head else "actor", folder, gradients, losses

    return reference


def step(
    rank,
    role: str,
    folder,
    gradients,
    layout: str,
    sequence_parallel: bool,
    recompute: str,
    tiles=False,
    dtype=torch.float32,
) -> dict:
    """One step on `layout`: losses, the largest error of each tensor against the reference, and the gradients."""
    from rlhfuse.models.build import Activations
    from rlhfuse.models.hf import load_weights
    from rlhfuse.parallel.groups import GroupMaker

    ranks, maker = ranks_of(**{role: layout}), GroupMaker(600)
    built = build(rank, maker, ranks, role, folder, Activations(sequence_parallel, recompute), dtype=dtype)
    pipelines = built.grid.layout.dp
    rows = random_rows(LENGTHS, 7)
    by_tiles = patch.object(heads, "by_tiles", lambda device: True) if tiles else nullcontext()
    with by_tiles:
        losses = one_step(rank, maker, ranks, {role: built}, {role: [rows] * pipelines})[role]
    _, _, tp_rank = built.grid.position(rank)
    errors, found = {}, built.gradients()
    for stage in built.stages:
        part = dict(first=stage == 0, last=stage == built.grid.layout.stages - 1, scalar_head=built.head)
        part |= dict(
            tp_rank=tp_rank,
            tp_size=built.grid.layout.tp,
            layers=built.grid.layout.stage_layers(built.spec.layers)[stage],
        )
        wanted = load_weights(gradients, built.spec, **part)
        assert {name for number, name in found if number == stage} == wanted.keys()
        for name, want in wanted.items():
            got = found[stage, name] / pipelines  # each pipeline ran the same micro-batches
            errors[stage, name] = float((got - want).abs().max() / want.abs().max())
    peak = {number: part.peak_live for number, part in built.stages.items()}
    maker.close()
    return {"losses": losses, "errors": errors, "gradients": found, "peak": peak}


def check(results: list[dict], losses: dict[int, float]) -> None:
    for result in results:
        for name, error in result["errors"].items():
            assert error <= TOLERANCE, f"{name}: off by {error:.2e} of its largest element"
        for microbatch, loss in result["losses"].items():
            assert loss == pytest.approx(losses[microbatch], rel=1e-6)
    assert any(result["losses"] for result in results)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, layout, sequence_parallel, tiles",
    [
        ("llama", "d1t4p1", False, False),
        ("llama", "d1t2p2", True, False),
        ("tied qwen2", "d1t2p2", True, False),
        pytest.param("tied qwen2", "d2t2p1", True, False, marks=SLOW),
        ("qwen3", "d1t2p2", False, False),  # norms over queries and keys see half of the heads on each rank
        pytest.param("qwen3", "d1t2p2", True, False, marks=SLOW),
        ("biased", "d1t2p2", False, False),
        pytest.param("phi3", "d1t2p2", False, False, marks=SLOW),
        ("biased", "d1t2p2v2", True, False),  # each rank sees the tokens of its own part only
        pytest.param("critic", "d1t2p2", True, False, marks=SLOW),
        pytest.param("critic", "d2t2p1", True, False, marks=SLOW),
        pytest.param("llama", "d2t1p2v2", False, False, marks=SLOW),
        ("tied qwen2", "d1t2p2v2", True, False),
        ("critic", "d1t1p4", False, False),
        pytest.param("llama", "d1t4p1", False, True, marks=SLOW),
        ("tied qwen2", "d1t2p2", True, True),
        ("tied qwen2", "d2t2p1", False, True),  # one weight with two gradients: the embedding's, and the output's
    ],
)
def test_gradients_are_those_of_the_whole_model(workers, references, name, layout, sequence_parallel, tiles):
    """With `tiles` by the loss of other devices than the CPU, which adds to the weight's gradient by itself."""
    role, folder, gradients, losses = references(name)
    check(workers.run(step, role, folder, gradients, layout, sequence_parallel, "none", tiles), losses)


@pytest.mark.parametrize(
    "name, layout, sequence_parallel",
    [("tied qwen2", "d1t2p2v2", True), ("critic", "d1t1p4", False), ("qwen3", "d1t4p1", True)],
)
def test_recomputation_gives_the_same_bits(workers, references, name, layout, sequence_parallel):
    role, folder, gradients, _ = references(name)
    plain, *others = (workers.run(step, role, folder, gradients, layout, sequence_parallel, how) for how in MODES)
    for recompute, again in zip(MODES[1:], others):
        for a, b in zip(plain, again):
            assert a["losses"] == b["losses"] and a["peak"] == b["peak"]
            for key, gradient in a["gradients"].items():
                assert torch.equal(gradient, b["gradients"][key]), f"{key} differs with recompute={recompute}"


def kept_bytes(rank: int, folder, layout: str, sequence_parallel: bool, split: bool, recompute: str) -> tuple[int, int]:
    """Bytes that one layer of a middle stage keeps from its forward to its backward, and that are left of them after
    it, weights and results apart; 0 on ranks without such a stage. With `split` W does not come."""
    from rlhfuse.models.build import Activations
    from rlhfuse.parallel.groups import GroupMaker

    ranks, maker = ranks_of(actor=layout), GroupMaker(600)
    built = build(rank, maker, ranks, "actor", folder, Activations(sequence_parallel, recompute))
    kept = left = 0
    built.optimizer.zero_grad()  # gradients have memory from now on
    for stage in (part.stage for part in built.stages.values() if not part.stage.first and not part.stage.last):
        (batch,) = packed_for(built, random_rows(((200, 56),), 1))
        shape = stage.hidden_shape(len(batch))
        with torch.no_grad():
            stage.forward(batch, torch.zeros(shape))  # rotations are there from now on
        stage.stack.deferred = [] if split else None
        before = live_storages()
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        out = stage.forward(batch, hidden)
        kept = added_bytes(live_storages(out.grad_fn), before, out)
        with stage.running():
            out.sum().backward()
        left = added_bytes(live_storages(), before, out, hidden, hidden.grad)
    maker.close()
    return kept, left


def live_storages(node=None) -> dict[int, int]:
    """Address -> bytes of what tensors hold that Python knows, and the graph below `node`."""
    gc.collect()  # what nobody holds any more, but in circles
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    nodes, seen = [node] if node else [], set()
    while nodes:
        node = nodes.pop()
        seen.add(node)
        fields = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        tensors += [*getattr(node, "saved_tensors", ()), *(field for field in fields if torch.is_tensor(field))]
        nodes += [before for before, _ in node.next_functions if before is not None and before not in seen]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def added_bytes(after: dict[int, int], before: dict[int, int], *results: torch.Tensor) -> int:
    known = before.keys() | {tensor.untyped_storage().data_ptr() for tensor in results}
    return sum(nbytes for place, nbytes in after.items() if place not in known)


@pytest.mark.parametrize(
    "name, layout, sequence_parallel, split",
    [("llama", "d1t1p4", False, False), ("llama", "d1t2p2v2", True, True), ("qwen3", "d1t2p2v2", False, False)],
)
def test_a_layer_keeps_what_the_planner_counts(workers, references, name, layout, sequence_parallel, split):
    """To the byte: what norms, attention and products keep; of these what is not made of others; its input alone."""
    _, folder, _, _ = references(name)
    spec, hardware, kept = ModelSpec.from_config(folder), hardware_by_name("cpu"), {}
    for recompute in MODES:
        found = workers.run(kept_bytes, folder, layout, sequence_parallel, split, recompute)
        kept[recompute], left = map(max, zip(*found))
        kind = dict(sequence_parallel=sequence_parallel, recompute=recompute)
        memory = AnalyticCost(spec, ParallelLayout.parse(layout), hardware, 4, **kind).memory
        assert kept[recompute] == memory.kept_layer_bytes(256), recompute
        assert split or left == 0, recompute  # the graph is still there, with what was put off
    assert kept["full"] < kept["none"] / 8 and kept["selective"] < 0.8 * kept["none"]


def random_model(base, seed: int) -> tuple[tuple, float]:
    """(arguments of `step` for a model of any shape, layout and way to train, how far off it may be)."""
    rng = random.Random(seed)
    family = rng.choice(("llama", "qwen2", "qwen3", "mistral", "phi3"))
    groups, head_dim = rng.choice((2, 4)), rng.choice((8, 16, 20, 32))
    heads = groups * rng.choice((1, 2, 3))
    shape = dict(model_type=family, num_attention_heads=heads, num_key_value_heads=groups, num_hidden_layers=2)
    shape |= dict(head_dim=head_dim, hidden_size=heads * (head_dim if family == "phi3" else rng.choice((6, 10, 16))))
    shape |= dict(intermediate_size=rng.choice((16, 36, 96)), tie_word_embeddings=rng.random() < 0.3)
    shape |= {
        "llama": dict(attention_bias=rng.random() < 0.5),
        "mistral": dict(sliding_window=rng.choice((None, 64))),
        "phi3": dict(pad_token_id=None),
    }.get(family, {})
    role = rng.choice(("actor", "critic"))
    folder = write_checkpoint(base / str(seed), seed=seed, scale=0.3, scalar_head=role == "critic", **shape)
    gradients, rows = base / f"{seed} gradients", random_rows(LENGTHS, 7)
    write_reference_gradients(folder, gradients, role == "critic", rows)
    layout, cut = rng.choice((("d4t1p1", False), ("d2t2p1", False), ("d2t2p1", True), ("d1t2p2", True)))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
    how = cut, rng.choice(MODES), False, dtype
    return (role, folder, gradients, layout, *how), 1e-5 if dtype == torch.float32 else 0.1


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=SLOW) for part in range(1, 8))])
def test_random_models_have_the_gradients_of_transformers(workers, tmp_path, part):
    """200 of them with the slow ones; with tensor ranks, sequence parallelism and recomputation."""
    for seed in range(25 * part, 25 * part + 25):
        arguments, most = random_model(tmp_path, seed)
        for result in workers.run(step, *arguments):
            assert max(result["errors"].values()) <= most, (seed, arguments[3:], result["errors"])
