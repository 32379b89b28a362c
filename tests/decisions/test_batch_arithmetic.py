"""Numbers of mini-batches and micro-batches that a run leaves open: by all batches and layouts of a small size."""

from itertools import product

import pytest
from testkit.four_ranks import TINY
from testkit.profiles import share

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.decisions.batch_arithmetic import resolve_batch
from rlhfuse.decisions.layout_rules import LayoutRules

SPECS = {"actor": TINY, "critic": TINY}
PIPELINES = (("d1t1p4", "d2t1p2"), ("d2t1p2", "d1t1p4"), ("d4t1p1", "d4t1p1"), ("d1t2p2", "d2t2p1"), ("d1t1p4", ""))


def run(samples: int, layouts: tuple[str, str], minibatches: int | str, microbatches: int | str) -> RunConfig:
    actor, critic = layouts
    return (
        RunConfig()
        .with_(
            rollout={"prompts_per_iteration": samples, "samples_per_prompt": 1},
            data={"max_prompt_tokens": 8},
            algorithm={"minibatches": minibatches, "name": "ppo" if critic else "reinforce++"},
            fusion={"actor_microbatches": microbatches},
            parallel={"actor_train": actor, "critic_train": critic or actor, "generation": "d4t1p1"},
        )
        .with_(parallel=dict.fromkeys(("inference", "critic_inference"), "d4t1p1"), reference={"path": "none"})
    )


def runs(config: RunConfig) -> bool:
    specs = {role: TINY for role in config.roles() if role in SPECS}
    config = config.with_(reward={"function": "m:f"})
    try:
        LayoutRules(config, specs, 4).table()
    except InputError:
        return False
    return True


@pytest.mark.parametrize("layouts", PIPELINES)
def test_the_former_default_where_it_runs_and_else_what_does(layouts):
    for samples, minibatches, microbatches in product(range(1, share(40)), (AUTO, 1, 2, 3), (AUTO, 1, 2, 3, 8)):
        found = resolve_batch(run(samples, layouts, minibatches, microbatches))
        chosen = found.algorithm.minibatches, found.fusion.actor_microbatches
        given = (minibatches, microbatches)
        assert all(number == fixed for number, fixed in zip(chosen, given) if fixed != AUTO)
        former = tuple(4 if fixed == AUTO else fixed for fixed in given)
        if runs(run(samples, layouts, *former)):
            assert chosen == former, (samples, given)
        choices = [range(1, 41) if fixed == AUTO else (fixed,) for fixed in given]
        if not runs(found):
            assert not any(runs(run(samples, layouts, *pair)) for pair in product(*choices)), (samples, given)


def test_beside_layouts_that_are_auto_minibatches_follow_from_samples_and_given_rows_alone():
    opened = run(64, ("auto", "auto"), AUTO, AUTO)
    found = resolve_batch(opened)
    assert (found.algorithm.minibatches, found.fusion.actor_microbatches) == (4, AUTO)
    for layouts in PIPELINES[:4]:
        assert resolve_batch(run(64, layouts, AUTO, AUTO)).algorithm.minibatches == 4, "as with layouts that are given"
    assert resolve_batch(run(6, ("auto", "auto"), AUTO, AUTO)).algorithm.minibatches == 1
    assert resolve_batch(run(64, ("auto", "d4t1p1"), 2, 8)) == run(64, ("auto", "d4t1p1"), 2, 8)
    assert resolve_batch(run(8, ("d4t1p1", "auto"), AUTO, AUTO)).algorithm.minibatches == 2
