"""Every rule of the task table, with the equation that its refusal prints."""

import re
from dataclasses import replace

import pytest
import yaml
from testkit.four_ranks import SPECS, TINY, config

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.decisions.batch_arithmetic import resolve_batch
from rlhfuse.decisions.layout_rules import LayoutRules
from rlhfuse.decisions.layouts import divisors, fits_model, planned_world_size, possible_layouts
from rlhfuse.tasks.iteration import Iteration
from rlhfuse.tasks.placement import Placement, instances_per_worker, worker_fault
from rlhfuse.tasks.task import ModelTask


def test_a_good_table_and_its_batch():
    rules = LayoutRules(config(), SPECS, 4)
    tasks = rules.table()
    assert [str(task.layout) for task in tasks] == ["d4t1p1"] * 4 + ["d1t1p4", "d2t1p2"]
    batch = rules.batch(tasks)
    assert (batch.samples, batch.samples_per_minibatch, batch.most_microbatches) == (64, 16, 4)
    assert batch.cut.rungs == (4,) and batch.microbatches_of(4) == {"actor": 4, "critic": 2}
    assert (batch.instances, batch.samples_per_instance) == (4, 16)
    assert batch.lines()[3].endswith("= 4 samples per micro-batch")
    assert batch.lines()[2].startswith("64 samples / 4 mini-batches = 16")


SCORERS = [f"{role}_inference" for role in ("reference", "reward", "critic")]
ALL = ("generation", "actor_train", "critic_train", *SCORERS)
ALONE = "algorithm.name=rloo reference.path=none algorithm.kl_coef=0"


def table(text: str) -> RunConfig:
    """The configuration with these `key=value`; a key without a group is a row of `parallel`."""
    pairs = (word.split("=", 1) for word in text.split())
    named = {key if "." in key else f"parallel.{key}": value for key, value in pairs}
    return config(**{key.replace(".", "__"): yaml.safe_load(value) for key, value in named.items()})


def rows(layout: str, *tasks: str) -> str:
    """All of the tasks have that layout."""
    return " ".join(f"{task}={layout}" for task in tasks)


SIX = rows("d6t1p1", "generation", *SCORERS)
M2 = "K1(1) * M1(3) = 3 is no multiple of K2(2)"
REFUSALS = [
    (8, "", "parallel.generation=d4t1p1: dp(4) * tp(1) * pp(1) = 4 != world_size(8)"),
    (4, "actor_train=d1t1p2", "parallel.actor_train=d1t1p2: dp(1) * tp(1) * pp(2) = 2 != world_size(4)"),
    (4, "critic_train=d1t4p4", "parallel.critic_train=d1t4p4: dp(1) * tp(4) * pp(4) = 16 != world_size"),
    (4, "sequence_parallel=true", "parallel.sequence_parallel=true cuts tokens over tensor ranks, but parallel.actor_"),
    (4, "reward_inference=d2t1p1@2-3", "reward_inference on ranks 2-3 of 4 is not yet runnable; drop @2-3"),
    (4, "generation=d2t1p2", "parallel.generation=d2t1p2: pp(2) != 1"),
    (4, "critic_inference=d1t1p4", "parallel.critic_inference=d1t1p4: pp(4) != 1"),
    (8, rows("d1t8p1", *ALL), "parallel.generation=d1t8p1: kv_heads(4) % tp(8) = 4, must be 0"),
    (6, f"{SIX} actor_train=d3t2p1 critic_train=d6t1p1", "critic_train=d6t1p1: pp(1) % s(2) = 1, must be 0"),
    (6, f"{SIX} actor_train=d2t1p3 critic_train=d3t1p2", "K1(2) * M1(4) = 8 is no multiple of K2(3), so no M2 has"),
    (4, "rollout.max_response_tokens=1", None),
    (
        4,
        "rollout.max_response_tokens=385",
        "_tokens(128) + rollout.max_response_tokens(385) = 513 > context(512) of actor",
    ),
    (4, "algorithm.minibatches=5", "prompts(16) * copies(4) = 64 samples; 64 % 5 = 4, must be 0"),
    (
        4,
        "algorithm.minibatches=32",
        "has 64 / 32 = 2 samples, fewer than replicas(1) * K1(1) * M1(4) = 4 micro-batches",
    ),
    (4, "fusion.actor_microbatches=3", f"fusion.actor_microbatches=3: {M2}"),
    (4, "fusion.actor_microbatches=3 fusion.intra_stage=false", M2),
    (
        4,
        "rollout.kv_blocks_per_instance=20",
        "20 * 16 = 320 tokens < 384 of one sample at full length; use at least 24",
    ),
    (4, "generation=d4t1p1@0-3", None),  # the whole world may be spelled out
]


def held_or_refused(made, specs, world_size, message):
    if message is None:
        assert len(LayoutRules(made, specs, world_size).table()) == 6
        return
    with pytest.raises(InputError, match=re.escape(message)):
        LayoutRules(made, specs, world_size).table()


@pytest.mark.parametrize("world_size, keys, message", REFUSALS)
def test_refusals_print_the_equation(world_size, keys, message):
    held_or_refused(resolve_device(table(keys)), SPECS, world_size, message)


def test_a_run_without_critic_has_neither_its_tasks_nor_its_rules():
    made = config(algorithm__name="grpo", fusion__actor_microbatches=3, parallel__critic_train="d9t9p9")
    specs = {role: spec for role, spec in SPECS.items() if role != "critic"}
    rules = LayoutRules(made, specs, 4)
    tasks = rules.table()
    assert [task.name for task in tasks] == ["generation", "reference_inference", "reward_inference", "actor_train"]
    batch = rules.batch(tasks)
    assert batch.microbatches_of(3) == {"actor": 3}
    assert len(batch.lines()) == 4 and "critic" not in "".join(batch.lines())


def test_nothing_but_the_actor():
    made = table(f"{ALONE} algorithm.epochs=2 reward.function=m:f")
    rules = LayoutRules(made, {"actor": TINY}, 4)
    tasks = rules.table()
    assert [task.name for task in tasks] == ["generation", "actor_train"]
    batch = rules.batch(tasks)
    assert batch.optimizer_steps == 8 and batch.lines()[-1] == "4 mini-batches x 2 epochs = 8 optimizer steps"


@pytest.mark.parametrize(
    "role, changes, message",
    [
        ("reference", {"context": 256}, "= 384 > context(256) of reference"),
        ("critic", {"context": 256, "sliding_window": True}, "= 384 > sliding_window(256) of critic"),
        ("critic", {"layers": 1}, "parallel.critic_train=d2t1p2: pp(2) > layers(1)"),
    ],
)
def test_models_must_fit_together(role, changes, message):
    held_or_refused(config(), {**SPECS, role: replace(TINY, **changes)}, 4, message)


@pytest.mark.parametrize(
    "vocabs, tp, keys, message",
    [
        ({"actor": 97, "reference": 97, "reward": 100, "critic": 100}, 4, "", None),
        ({"actor": 65, "reward": 65}, 4, ALONE, "parallel.actor_train=d1t4p1: the last of tp(4) ranks has rows 96"),
        (dict.fromkeys(SPECS, 65), 4, "", "reference_inference=d1t4p1: the last of tp(4) ranks has rows 96 to 127"),
        (dict.fromkeys(SPECS, 100), 3, "", "parallel.generation=d1t3p1: padded vocab(128) % tp(3) = 2, must be 0"),
        (
            dict.fromkeys(SPECS, 512) | {"reward": 384},
            4,
            "",
            "rows 384 to 511 of the padded vocabulary, none of vocab(384",
        ),
    ],
)
def test_tensor_ranks_need_rows_of_the_vocabulary(vocabs, tp, keys, message):
    """Rows of ids that all models have, where log-probabilities come out."""
    specs = {role: replace(TINY, heads=12, kv_heads=12, vocab=vocab) for role, vocab in vocabs.items()}
    held_or_refused(table(f"{rows(f'd1t{tp}p1', *ALL)} {keys}"), specs, tp, message)


def test_stop_tokens_are_ids_that_every_model_has():
    specs = {**SPECS, "reward": replace(TINY, vocab=400)}
    assert LayoutRules(config(rollout__stop_token_ids=(399,)), specs, 4).table()
    with pytest.raises(InputError, match=re.escape("rollout.stop_token_ids=[3, 400]: 400 is not an id in [0, 400)")):
        LayoutRules(config(rollout__stop_token_ids=(3, 400)), specs, 4).table()


@pytest.mark.parametrize(
    "world_size, keys, message",
    [
        (8, "", "parallel.generation=d4t1p1: dp(4) * tp(1) * pp(1) = 4 != world_size(8); or auto, as other layouts"),
        (4, "generation=d2t1p2", "parallel.generation=d2t1p2: pp(2) != 1"),
        (4, "critic_train=d1t1p4 generation=d1t3p1", "parallel.generation=d1t3p1: dp(1)"),
        (4, "critic_train=d2t1p1@0-1", "critic_train on ranks 0-1 of 4 is not yet runnable"),
        (4, "actor_train=d1t4p1 critic_train=d4t1p1 generation=auto", "pp(1) % s(4) = 1, must be 0"),
    ],
)
def test_rows_beside_an_auto_are_held_against_world_models_and_each_other(world_size, keys, message):
    with pytest.raises(InputError, match=re.escape(message)):
        LayoutRules(resolve_batch(table(f"actor_train=auto {keys}")), SPECS, world_size).given_rows()


def test_a_table_with_an_auto_is_no_table_yet():
    made = resolve_batch(config(parallel__actor_train="auto", fusion__actor_microbatches="auto"))
    assert [task.name for task in LayoutRules(made, SPECS, 4).given_rows()][-1] == "critic_train"
    with pytest.raises(InputError, match="parallel.actor_train=auto: no layouts are searched here"):
        LayoutRules(made, SPECS, 4).table()
    with pytest.raises(InputError, match="trainer.recompute=auto: no layouts are searched here"):
        LayoutRules(config(trainer__recompute="auto"), SPECS, 4).table()


@pytest.mark.parametrize(
    "generation, reward, workers, spanned",
    [
        ("d4t1p1", "d2t2p1", ((0, 1), (2, 3)), (0, 1)),  # of worker 0: instances
        ("d2t2p1", "d1t4p1", ((0, 1, 2, 3),), (0, 1)),
        ("d1t4p1", "d2t2p1", ((0, 1), (2, 3)), (0,)),
        ("d4t1p1", "d4t1p1", ((0,), (1,), (2,), (3,)), (0,)),
    ],
)
def test_workers_are_as_wide_as_the_widest_model_that_scores(generation, reward, workers, spanned):
    made = config(parallel__generation=generation, parallel__reward_inference=reward)
    tasks = LayoutRules(made, SPECS, 4).table()
    placement, iteration = Placement.of(tasks), Iteration.of(tasks).verify(4)
    assert placement.workers == workers and placement.instances_under(0) == spanned
    assert instances_per_worker(tasks) == len(spanned)
    assert {task.worker for task in iteration.models if task.kind == "score"} == {len(workers[0])}


@pytest.mark.parametrize(
    "generation, reward, critic, fault",
    [
        (
            "d6t2p1",
            "d4t3p1",
            "d4t3p1",
            "critic_inference: with parallel.generation=d6t2p1 tp(3) % tp(2) = 1, must be 0",
        ),
        ("d2t6p1", "d4t3p1", "d6t2p1", "critic_inference: tp(3) of a worker % tp(2) = 1, must be 0"),
        ("d4t3p1", "d2t6p1", "d6t2p1", ""),
    ],
)
def test_workers_hold_whole_instances_or_lie_in_one(generation, reward, critic, fault):
    names = "generation", "critic_inference", "reward_inference"
    layouts = map(ParallelLayout.parse, (generation, critic, reward))
    found = worker_fault([ModelTask.of(name, layout, 12) for name, layout in zip(names, layouts)])
    assert found.startswith(fault) and bool(found) == bool(fault)


def test_the_number_of_ranks_is_that_of_a_layout_that_is_given(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    made = config(parallel__actor_train="auto")
    assert planned_world_size(made, None) == 4 and planned_world_size(made, 8) == 8
    nothing = table(rows("auto", *ALL))
    assert planned_world_size(nothing, 2) == 2
    with pytest.raises(InputError, match="parallel.actor_train=auto: the number of ranks is not known; start under"):
        planned_world_size(nothing, None)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert planned_world_size(nothing, None) == 16


def test_possible_layouts_are_those_that_the_model_can_be_cut_into():
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(1) == [1]
    spec, found = SPECS["actor"], {}
    for chunks in ((), (1,), (1, 2)):
        found[chunks] = set(map(str, possible_layouts(spec, 8, 4, 8, chunks)))
        assert all(fits_model(ParallelLayout.parse(text), spec) for text in found[chunks])
    assert found[()] <= found[(1,)] <= found[(1, 2)] and not any("t8" in text for text in found[(1, 2)])
    assert {"d8t1p1", "d2t4p1"} <= found[()] and "d2t1p4" in found[(1,)] and "d4t1p2v2" in found[(1, 2)]
    assert not any(ParallelLayout.parse(text).dp > 2 for text in map(str, possible_layouts(spec, 8, 4, 2, (1,))))
