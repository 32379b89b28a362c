"""A dry run of every stage before the first program leaves no bit changed, and every later step has the same bits."""

from unittest import mock

import pytest
from testkit.training_pair import Plan, build_pair


def stepped(rank: int, folders: dict, plan: Plan, options: dict) -> dict:
    """Digests of a pair that trains, and of one that is dry-run first and again between its steps."""
    plain = build_pair(rank, folders, plan, **options)
    expected = [(plain.train(seed), plain.digest())[1] for seed in range(2)]
    losses = plain.train(2)
    plain.close()
    pair = build_pair(rank, folders, plan, **options)
    before, seen = pair.digest(), []
    for model in pair.models.values():
        model.optimizer.dry_step = mock.Mock(wraps=model.optimizer.dry_step)
    executor_run = pair.step._executor.run

    def run(work):
        seen.append(pair.digest())
        for model in pair.models.values():
            for buffer in model.optimizer._buffers():
                assert not buffer.grad_data.any(), "gradients of the dry run are gone"
        return executor_run(work)

    pair.step._executor.run = run
    after = []
    for seed in range(2):
        pair.step.dry_run_first = True
        pair.train(seed)
        after.append(pair.digest())
    again = pair.train(2)
    pair.close()
    return {
        "dry": seen[:2] == [before, after[0]],
        "steps": after == expected,
        "stats": again.stats == losses.stats,
        "calls": [model.optimizer.dry_step.call_count for model in pair.models.values()],
    }


@pytest.mark.parametrize(
    "plan, options",
    [
        (Plan(), {}),
        (Plan("d2t1p2v2", "d2t1p2v2"), {"dtype": "bfloat16"}),
        (Plan("d1t2p2", "d2t2p1"), {"sequence_parallel": True, "recompute": "full"}),
        (Plan("d2t1p2", "d4t1p1"), {"optim": {"name": "sgd"}}),
        (Plan("d1t2p2", "d1t1p4", split=("actor", "critic")), {"sequence_parallel": True}),
    ],
)
def test_no_bit_is_changed(workers, folders, plan, options):
    for seen in workers.run(stepped, folders, plan, options):
        assert seen == {"dry": True, "steps": True, "stats": True, "calls": [2, 2]}
