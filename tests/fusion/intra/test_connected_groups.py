"""Every group that a training step communicates in has done so before, with that operation; so has every channel."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from testkit.tiny import write_checkpoint
from testkit.training_pair import build_pair

KINDS = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "all_gather": "all_gather",
}
POINTS = {"send": "send", "recv": "receive"}


@pytest.fixture(scope="module")
def tied_folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("tied")
    actor = write_checkpoint(base / "actor", seed=1, tie_word_embeddings=True)
    critic = write_checkpoint(base / "critic", scalar_head=True, seed=2)
    return {"actor": actor, "reference": actor, "critic": critic, "reward": critic}


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

    for name in names:
        setattr(dist.ProcessGroup, name, noted(name))
    return lambda: [setattr(dist.ProcessGroup, name, original) for name, original in originals.items()]


def uses(rank: int, folders: dict, layouts, options: dict) -> dict:
    """What was used at start, and what in a training step only."""
    start, step = set(), set()
    undo = watch(start)
    try:
        pair = build_pair(rank, folders, *layouts, **options)
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
    "layouts, options, kinds",
    [
        (("d1t1p4", "d2t1p2"), {}, {"all_reduce", "reduce_scatter", "all_gather", "send", "receive"}),
        (("d1t2p2", "d2t2p1"), {"sequence_parallel": True}, set(KINDS.values())),
        (("d2t1p2", "d2t1p2"), {"optimizer": "sgd"}, {"all_reduce"}),
    ],
)
def test_nothing_is_first_used_inside_a_step(workers, tied_folders, layouts, options, kinds):
    for seen in workers.run(uses, tied_folders, layouts, options):
        assert kinds <= {kind for _, kind in seen["step"]}, "the step is watched"
        assert seen["late"] == set()
