"""The space of tables: everything that could run is in it, and nothing that a rule refuses."""

from dataclasses import replace
from itertools import product

import pytest
from testkit import search_cases
from testkit.profiles import share
from testkit.search_cases import SearchCase, auto_config, random_case, space_of_setting, spec_of, tables_of

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.decisions.batch_arithmetic import BatchArithmetic
from rlhfuse.decisions.layout_rules import LayoutRules
from rlhfuse.decisions.layouts import fits_model
from rlhfuse.planning.search.table import TOKENS, CutSetting, Inference, Table

KEYS = {"algorithm__name": "grpo", "reward__function": "m:f"}


def every_layout(world: int) -> list[ParallelLayout]:
    sizes = range(1, world + 1)
    return [
        ParallelLayout(dp, tp, pp, chunks=chunks)
        for dp, tp, pp, chunks in product(sizes, sizes, sizes, (1, 2))
        if dp * tp * pp == world and (chunks == 1 or pp > 1)
    ]


def may_run(case, table: Table) -> bool:
    """By the rules that a run is held against; two models that train have as many virtual stages."""
    if table.critic_train and table.critic_train.chunks != table.actor_train.chunks:
        return False
    return search_cases.may_run(case, table)


def every_table(case) -> list[Table]:
    """Budgets of a few samples of full length, and of all that a pipeline has."""
    layouts, config = every_layout(case.world_size), case.setting.run.config
    samples = config.samples_per_iteration // config.algorithm.minibatches
    flat = [layout for layout in layouts if layout.pp == 1]
    scored = {widest_of(case, flat, width) for width in range(1, case.world_size + 1) if not case.world_size % width}
    critics = layouts if "critic" in case.specs else [None]
    found = []
    for actor, critic, cut in product(layouts, critics, (False, True)):
        longest, every = sum(config.longest_sample), -(-samples // actor.dp)
        budgets = {-(-min(2 * every, halves) * longest // 2) for halves in (2, 3, 4, 6, 8)} | {every * longest}
        for generation, inference, tokens in product(flat, scored, budgets):
            inference = inference or (("inference", generation),)
            table = Table(generation, inference, actor, critic, CutSetting(TOKENS, tokens), "full", cut)
            if generation.dp <= config.samples_per_iteration and may_run(case, table):
                found.append(table)
    return found


def widest_of(case, flat: list[ParallelLayout], width: int) -> Inference:
    """Each model that scores as wide as its shape and such a worker allow."""
    made = []
    for role in case.setting.run.config.scorers():
        fitting = [one for one in flat if width % one.tp == 0 and fits_model(one, case.specs[role])]
        made.append((f"{role}_inference", max(fitting, key=lambda one: one.tp)))
    return tuple(made)


def smallest_budgets(case, tables: list[Table]) -> list[Table]:
    """The tables, but those that another with fewer tokens, else the same, cuts alike all that is drawn."""
    kept, setting = {}, case.setting
    for table in sorted(tables, key=lambda table: -table.cut.value):
        config, alone = table.of(setting.run.config), replace(table, cut=CutSetting(TOKENS, 1))
        layouts = {"generation": table.generation, "actor_train": table.actor_train}
        layouts |= {"critic_train": table.critic_train} if table.critic_train else {}
        batch = BatchArithmetic.of(
            config.rollout, config.algorithm, config.fusion, layouts, sum(setting.run.config.longest_sample)
        )
        kept[alone.text, setting.inputs.drawn.rung_of_each(batch.cut)] = table
    return list(kept.values())


LARGER = [(4, 4, 4, True), (4, 1, 2, True), (6, 3, 3, False)]


@pytest.mark.parametrize(
    "world, kv_heads, layers, critic",
    [(2, 2, 2, True), (8, 2, 4, False), *(pytest.param(*one, marks=pytest.mark.ci) for one in LARGER)],
)
def test_the_space_has_every_table_that_could_run(world, kv_heads, layers, critic):
    keys = {"rollout__prompts_per_iteration": 12, "fusion__intra_stage": "search", "trainer__hardware": "h100"}
    actor, other = spec_of(layers, 32 * 12, 12, kv_heads, 512), spec_of(2, 64 * 6, 6, 6, 512)
    specs = {"actor": actor, "reference": actor} | ({"critic": other, "reward": actor} if critic else {})
    config = auto_config(**keys, **({} if critic else KEYS), trainer__recompute="full")
    case = SearchCase(config, specs, world, None)
    space = {table.text for table in tables_of(space_of_setting(case.setting)) if may_run(case, table)}
    every = every_table(case)
    kept = {table.text for table in smallest_budgets(case, every)}
    assert space == kept and 0 < len(kept) < len(every)


@pytest.mark.parametrize("seed", range(share(25)))
def test_tables_of_the_space_keep_the_rules_of_a_run(seed):
    """But that of vocabularies of several sizes, which drafts are asked for."""
    case = random_case(seed)
    config, vocab = case.setting.run.config, {spec.vocab for spec in case.specs.values()}
    for table in tables_of(space_of_setting(case.setting)):
        try:
            LayoutRules(table.of(config), case.specs, case.world_size).table()
        except InputError as error:
            assert len(vocab) > 1 and "none of vocab(" in str(error)


def test_two_models_have_as_many_virtual_stages():
    case = random_case(3, most_tables=10_000)
    rows = space_of_setting(case.setting).training
    assert all(len({layout.chunks for layout in row.layouts.values()}) == 1 for row in rows)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"parallel__actor_train": "d1t4p1", "parallel__critic_train": "d1t1p4v2"}, "parallel.actor_train=d1t4p1 and "),
        ({"parallel__actor_train": "d4t1p1", "fusion__actor_microbatches": 16}, "fusion.actor_microbatches=16: no "),
    ],
)
def test_rows_that_are_given_and_can_be_with_nothing_are_named(keys, message):
    specs = dict.fromkeys(("actor", "critic", "reference", "reward"), spec_of(8, 256, 8, 4))
    with pytest.raises(InputError) as caught:
        space_of_setting(SearchCase(auto_config(**keys), specs, 4, None).setting)
    assert message in str(caught.value) and "\n" not in str(caught.value)
