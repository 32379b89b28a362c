"""NaN and infinity anywhere in a training step are named on all ranks, and never reach a weight."""

import pytest
from testkit.training_pair import LR, Plan, build_pair, make_batch

from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.tasks.balance import split_microbatches


def spoiled(field: str, sample: int):
    """The mini-batch of seed 5 with a NaN in one sample's `field`."""
    batch = make_batch(5)
    first = int(batch.response_lengths[:sample].sum())
    values = getattr(batch, field).clone()
    values[first] = float("nan")
    return batch.with_fields(**{field: values})


def infinite(role: str, number: int, work: str, microbatch: int, place: tuple[int, int, int]):
    """What a stage gives out of a micro-batch is infinite in one place."""

    def break_it(pair, rank: int) -> None:
        stage = pair.models[role].stages.get(number)
        original = getattr(stage, work, None)

        def worked(given: int, *more):
            out = original(given, *more)
            if given == microbatch:
                out[place] = float("inf")
            return out

        if stage is not None:
            setattr(stage, work, worked)

    return break_it


def overflowing_norm(pair, rank: int) -> None:
    """Gradients of 1e30 on rank 1: each finite, but not their squares."""
    optimizer = pair.models["critic"].optimizer
    original = optimizer.start_reduction

    def start(stage, finite=None):
        if rank == 1:
            next(iter(optimizer.module.parameters())).main_grad.fill_(1e30)
        original(stage, finite)

    optimizer.start_reduction = start


FAULTS = {
    "advantages": (lambda pair, rank: None, lambda: spoiled("advantages", 3)),
    "returns": (lambda pair, rank: None, lambda: spoiled("returns", 7)),
    "gradient": (infinite("actor", 2, "backward", 1, (3, 0, 5)), lambda: make_batch(5)),
    "hidden": (infinite("critic", 0, "forward", 0, (0, 0, 0)), lambda: make_batch(5)),
    "norm": (overflowing_norm, lambda: make_batch(5)),
}


def faults(rank: int, folders: dict, kinds: list[str], dtype: str, optimizer: str) -> dict:
    """Each bad step, before and after a good one: what it raised, and which models it changed."""
    out: dict = {"errors": [], "changed": []}

    def fail(pair, kind: str) -> None:
        before = state(pair)
        breaks, batch = FAULTS[kind]
        breaks(pair, rank)
        try:
            pair.step.run(batch(), LR, AlgorithmConfig())
        except FloatingPointError as error:
            out["errors"].append(str(error))
        for model in pair.models.values():  # whole again
            for stage in model.stages.values():
                stage.__dict__.pop("forward", None), stage.__dict__.pop("backward", None)
            model.optimizer.__dict__.pop("start_reduction", None)
        out["changed"].append([role for role, now in state(pair).items() if now != before[role]])

    def state(pair) -> dict:
        return {role: pair.digest(role) for role in pair.models}

    split = ("actor", "critic") if dtype == "bfloat16" else ()
    pair = build_pair(rank, folders, Plan(split=split), dtype=dtype, optim={"name": optimizer})
    for kind in kinds:
        fail(pair, kind)
    pair.train(0)
    for kind in kinds:
        fail(pair, kind)
    parameters = [p for model in pair.models.values() for m in model.optimizer.modules.values() for p in m.parameters()]
    out["finite"] = all(bool(p.isfinite().all()) for p in parameters)
    pair.close()
    return out


def place_of(sample: int, pipelines: int) -> int:
    """The micro-batch, within its pipeline, that a sample of seed 5 is cut into."""
    parts = split_microbatches(make_batch(5).lengths.tolist(), 4)
    return next(n for n, part in enumerate(parts) if sample in part) // pipelines


@pytest.mark.parametrize(
    "dtype,optimizer,kinds",
    [
        ("float32", "adam", ["advantages", "returns", "gradient", "hidden", "norm"]),
        ("bfloat16", "adam", ["returns", "gradient"]),
        ("float32", "sgd", ["returns"]),
    ],
)
def test_a_fault_is_named_on_all_ranks_and_its_model_does_not_step(workers, folders, dtype, optimizer, kinds):
    named = {
        "advantages": f"actor, stage 3, micro-batch {place_of(3, 1)}: the loss",
        "returns": f"critic, stage 1, micro-batch {place_of(7, 2)}: the loss",
        "gradient": "actor, stage 2, micro-batch 1: the gradient",
        "hidden": "critic, stage 0, micro-batch 0: the loss or hidden state",
        "norm": "the gradient norm of critic",
    }
    runs = workers.run(faults, folders, kinds, dtype, optimizer)
    for run in runs:
        assert run["errors"] == runs[0]["errors"] and len(run["errors"]) == 2 * len(kinds)
        for kind, error, changed in zip(2 * kinds, run["errors"], run["changed"]):
            assert error.startswith(named[kind]), error
            # weights, main weights, Adam's moments and counters: of all models, but those that are said to have stepped
            assert changed == ([error.rpartition(": ")[2]] if "stepped before it was seen" in error else []), error
            assert changed != [named[kind].split(",")[0]]
            if kind == "hidden":  # seen on its rank before any reduction: nobody steps
                assert error.endswith("no model stepped"), error
        assert run["finite"]
