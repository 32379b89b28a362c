"""Layouts that are auto get values: from the checkpoint that is resumed, else from a search; what is given stays."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.four_ranks import SPECS, config, drafted
from testkit.profiles import examples
from testkit.search_cases import OPEN, SCORERS, SearchCase

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import layout_rows, searched_keys
from rlhfuse.config.values import AUTO
from rlhfuse.planning.candidate import draft_plan
from rlhfuse.planning.job import Job, StoredLayouts
from rlhfuse.planning.search.search import Ranking
from rlhfuse.planning.settle import settle
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.rules.builders import greedy
from rlhfuse.tasks.task import TASKS

GIVEN = {"generation": "d2t2p1", "actor_train": "d1t1p4", "critic_train": "d2t1p2", **dict.fromkeys(SCORERS, "d4t1p1")}
STORED = StoredLayouts(
    "run/checkpoints/iteration-3",
    4,
    {
        **dict.fromkeys(SCORERS, "d2t2p1"),
        "generation": "d2t2p1",
        "actor_train": "d1t1p4:1,2,3,2",
        "critic_train": "d2t1p2",
        "fusion.actor_microbatches": "2",
        "parallel.sequence_parallel": "False",
    },
)


def everything(**keys):
    return config(**{**OPEN, "algorithm__minibatches": AUTO, **keys})


def changes(asked, made) -> dict:
    before = {key: value for key, value, _ in asked.leaves()}
    return {key: value for key, value, _ in made.leaves() if before[key] != value}


def settled(made, specs=SPECS, **found):
    return settle(Job(made, specs, 4, **found))


def is_settled(made) -> bool:
    values = [getattr(made.parallel, name) for name in type(made.parallel).model_fields if name != "stage_layers"]
    cut = made.fusion.microbatch_tokens, made.fusion.actor_microbatches
    return AUTO not in (*values, made.trainer.recompute, made.algorithm.minibatches) and cut.count(AUTO) == 1


def test_where_nothing_is_auto_nothing_changes():
    made = config()
    found = settled(made)
    filled = {"trainer.dtype": "float32", "rollout.block_tokens": 16}
    assert changes(made, found.config) == filled and found.lines == ()


def test_everything_auto_becomes_a_table_that_can_be_planned():
    made = everything(trainer__recompute=AUTO)
    found = settled(made)
    assert is_settled(found.config)
    draft = draft_plan(found)
    assert draft.memory.fullest([0.0] * draft.training.problem.nodes)
    table = Ranking(SearchCase(made, SPECS, 4, None).setting).fastest(1).best.table
    parallel = found.config.parallel
    assert (parallel.generation, parallel.actor_train) == (str(table.generation), str(table.actor_train))
    assert {row: getattr(parallel, row) for row in SCORERS} == {row: str(layout) for row, layout in table.inference}
    (chosen,) = found.lines
    assert chosen.startswith("layouts of the search: generation=") and f"actor_train={table.actor_train}" in chosen


@examples(25)
@given(st.sets(st.sampled_from([*GIVEN, "sequence_parallel"])), st.booleans(), st.sampled_from([AUTO, 2, 4]))
def test_what_is_given_stays_and_all_else_is_decided_the_same_every_time(rows, recompute, microbatches):
    keys = {f"parallel__{row}": AUTO if row in rows else layout for row, layout in GIVEN.items()}
    keys |= {"parallel__sequence_parallel": AUTO if "sequence_parallel" in rows else False}
    keys |= {"fusion__actor_microbatches": microbatches, "trainer__recompute": AUTO if recompute else "none"}
    made = config(**keys)
    found = settled(made)
    assert found == settled(made)
    assert not searched_keys(found.config)
    after = {key: value for key, value, _ in found.config.leaves()}
    for key, value, _ in made.leaves():
        if value != AUTO and key.startswith(("parallel.", "fusion.", "algorithm.")):
            assert after[key] == value, key
    draft_plan(found)


def test_minibatches_follow_from_the_samples_whatever_table_is_chosen():
    assert settled(everything()).config.algorithm.minibatches == 4
    few = everything(rollout__prompts_per_iteration=6, rollout__samples_per_prompt=1)
    assert settled(few).config.algorithm.minibatches == 1


def test_rows_of_models_that_the_run_has_not_are_as_if_nothing_was_said():
    specs = {role: SPECS[role] for role in ("actor", "reference")}
    made = everything(algorithm__name="grpo", reward__function="m:f")
    found = settled(made, specs).config
    assert is_settled(found) and found.parallel.critic_train == "d1t1p1"
    assert found.parallel.reward_inference == found.parallel.inference == found.parallel.reference_inference
    assert "critic" not in "".join(layout_rows(found))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"parallel__generation": "d2t1p1"}, "parallel.generation=d2t1p1: dp(2) * tp(1) * pp(1) = 2 != world_size(4)"),
        ({"parallel__critic_train": "d1t1p1"}, "parallel.critic_train=d1t1p1: .* != world_size(4); or auto"),
        ({"parallel__inference": "d1t1p4", "parallel__reward_inference": "d1t1p4"}, "reward_inference=d1t1p4: pp(4)"),
        ({"parallel__lengths": "/nowhere.csv"}, "parallel.lengths=/nowhere.csv: /nowhere.csv does not"),
        ({"trainer__memory_limit_gb": 0.01}, "memory: "),
        ({"fusion__schedule": "/nowhere.json"}, "/nowhere.json does not exist"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(keys, message):
    with pytest.raises(InputError) as caught:
        settled(everything(**keys))
    assert all(part in str(caught.value) for part in message.split(".*")) and "\n" not in str(caught.value)


@pytest.mark.parametrize("split", ["true", "false"])
def test_a_schedule_that_is_given_is_of_the_table_that_is_found(split, tmp_path):
    """Whether backwards are split is what the file says."""
    keys = {"parallel__actor_train": "d1t1p4", "parallel__critic_train": "d2t1p2", "fusion__split_backward": split}
    problem = drafted(config(**keys), SPECS, 4).training.problem
    save_schedule(tmp_path / "schedule.json", greedy(problem))
    minibatches = config().algorithm.minibatches
    rows = dict.fromkeys((f"parallel__{row}" for row in ("generation", "inference", *SCORERS)), "d4t1p1")
    made = everything(fusion__schedule=str(tmp_path / "schedule.json"), algorithm__minibatches=minibatches, **rows)
    found = settled(made).config
    layouts = [getattr(found.parallel, row).partition(":")[0] for row in ("actor_train", "critic_train")]
    assert layouts == ["d1t1p4", "d2t1p2"]
    draft = drafted(found, SPECS, 4)
    assert draft.training.given and all(p.split == (split == "true") for p in draft.training.problem.pipelines)


# of a checkpoint --------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_layouts_that_it_had():
    found = settled(everything(), stored=STORED)
    parallel = found.config.parallel
    assert is_settled(found.config)
    assert all(getattr(parallel, name) == STORED.layouts[name] for name in TASKS)
    assert parallel.sequence_parallel is False and found.config.fusion.actor_microbatches == 2
    (line,) = found.lines
    told = "layouts of run/checkpoints/iteration-3, which had: generation=d2t2p1 inference=d2t2p1 actor"
    assert line.startswith(told)


@pytest.mark.parametrize("rows", [{}, GIVEN], ids=["auto layouts", "given layouts"])
@pytest.mark.parametrize("name, value", [("microbatch_tokens", 777), ("actor_microbatches", 4)])
def test_a_resumed_run_cuts_its_mini_batches_as_it_did(rows, name, value):
    """By tokens or into a number, whatever a search would choose now; else sums would end in other bits."""
    layouts = {key: text for key, text in STORED.layouts.items() if not key.startswith("fusion.")}
    stored = replace(STORED, layouts={**layouts, f"fusion.{name}": str(value)})
    made = everything(**{f"parallel__{row}": layout for row, layout in rows.items()})
    found = settled(made, stored=stored).config.fusion
    assert {"microbatch_tokens": AUTO, "actor_microbatches": AUTO, name: value} == {
        key: getattr(found, key) for key in ("microbatch_tokens", "actor_microbatches")
    }


def test_recomputation_is_searched_beside_the_layouts_of_a_checkpoint():
    found = settled(everything(trainer__recompute=AUTO), stored=STORED)
    assert found.config.parallel.actor_train == "d1t1p4:1,2,3,2" and found.config.trainer.recompute == "none"
    assert len(found.lines) == 2 and "layouts of the search: recompute=none" in found.lines[1]
    alone = settled(config(trainer__recompute=AUTO), stored=STORED)
    assert alone.config.parallel.actor_train == "d1t1p4" and alone.config.trainer.recompute == "none"
    assert not any("checkpoints" in line for line in alone.lines), "no layout is open"


def test_rows_that_are_given_stay_beside_those_of_a_checkpoint():
    made = everything(parallel__critic_train="d1t1p4", fusion__actor_microbatches=4)
    found = settled(made, stored=STORED).config
    assert (found.parallel.critic_train, found.fusion.actor_microbatches) == ("d1t1p4", 4)
    assert found.parallel.actor_train == "d1t1p4:1,2,3,2"


@pytest.mark.parametrize(
    "stored, why",
    [
        (StoredLayouts("there", 8, STORED.layouts), "it was saved by 8 ranks, these are 4"),
        (StoredLayouts("there", 4, {"generation": "d4t1p1"}), "it does not say parallel."),
        (StoredLayouts("there", 4, {**STORED.layouts, "actor_train": "d1t4p1"}), "critic_train=d2t1p2"),
    ],
)
def test_layouts_of_a_checkpoint_that_cannot_be_are_searched_anew_and_it_is_said(stored, why):
    found = settled(everything(), stored=stored)
    anew = settled(everything())
    assert found.config == anew.config and found.lines[1:] == anew.lines
    assert found.lines[0].startswith("layouts that are auto are not those of there: ") and why in found.lines[0]
