"""Every group that a training step communicates in has done so before, with that operation; so has every channel."""

import pytest
import torch.distributed as dist
from testkit.training_pair import Plan, build_pair, write_pair

KINDS = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
}
POINTS = {"send": "send", "recv": "receive"}


@pytest.fixture(scope="module")
def tied_folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("tied"), actor={"tie_word_embeddings": True})


def watch(used: set):
    """Note (group, kind of operation) of whatever is asked of a process group from now on; returns what undoes it."""
    names = [name for name in dir(dist.ProcessGroup) if any(word in name for word in (*KINDS, *POINTS))]
    originals = {name: getattr(dist.ProcessGroup, name) for name in names}

    def noted(name: str):
        kind = next((kind for word, kind in (KINDS | POINTS).items() if word in name), name)

        def call(group, *arguments, **options):
            used.add((group.group_name, kind))
            return originals[name](group, *arguments, **options)

        return call

    own = {name: vars(dist.ProcessGroup).get(name) for name in names}  # getattr would give them unbound for ever
    for name in names:
        setattr(dist.ProcessGroup, name, noted(name))

    def undo() -> None:
        for name, value in own.items():
            setattr(dist.ProcessGroup, name, value) if value else delattr(dist.ProcessGroup, name)

    return undo


def uses(rank: int, folders: dict, plan: Plan, options: dict) -> dict:
    """What was used at start, and what in a training step only."""
    start, step = set(), set()
    undo = watch(start)
    try:
        pair = build_pair(rank, folders, plan, **options)
    finally:
        undo()
    undo = watch(step)
    try:
        pair.train(0)
    finally:
        undo()
    everyone = dist.group.WORLD.group_name
    pair.close()
    return {"start": start, "late": {use for use in step - start if use[0] != everyone}, "step": step}


@pytest.mark.parametrize(
    "plan, options, kinds",
    [
        (Plan(), {}, {"all_reduce", "reduce_scatter", "all_gather", "send", "receive"}),
        (Plan("d1t2p2", "d2t2p1"), {"sequence_parallel": True}, set(KINDS.values())),
        (Plan("d2t1p2", "d2t1p2"), {"optim": {"name": "sgd"}}, {"all_reduce"}),
    ],
)
def test_nothing_is_first_used_inside_a_step(workers, tied_folders, plan, options, kinds):
    for seen in workers.run(uses, tied_folders, plan, options):
        assert kinds <= {kind for _, kind in seen["step"]}, "the step is watched"
        assert seen["late"] == set()
