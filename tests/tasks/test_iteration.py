"""Tables of tasks: what verify accepts runs to its end, what it refuses is named, and the table that runs parses."""

import random

import pytest
from testkit.iteration_runs import IterationRun

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import from_json, to_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.tasks.iteration import Iteration
from rlhfuse.tasks.mesh import Mesh
from rlhfuse.tasks.task import ModelTask, Take, Task

RANDOM_TABLES, INTERLEAVINGS, WORLD = 3000, 20, 4
UNITS, KINDS = ("sample", "group", "minibatch", "batch"), ("generate", "score", "train", "move", "host", "meet")
LAYOUTS = {"generation": "d2t2p1", "reference_inference": "d4t1p1", "actor_train": "d1t1p4"}
PPO = {**LAYOUTS, "reward_inference": "d4t1p1", "critic_inference": "d2t2p1", "critic_train": "d2t1p2"}


def table(*rows: str) -> Iteration:
    """Rows of block, name, kind, ranks[/ranks of a worker], and givers[:unit][@lag]; every task gives one field."""
    tasks = []
    for block, name, kind, place, *takes in map(str.split, rows):
        (mesh, _, worker), parts = place.partition("/"), [take.partition("@") for take in takes]
        givers = [(*giver.partition(":"), int(lag or 0)) for giver, _, lag in parts]
        inputs = tuple(Take("out", giver, unit or "batch", lag) for giver, _, unit, lag in givers)  # type: ignore
        tasks.append(Task(name, kind, block, Mesh.parse(mesh), int(worker or 0), inputs, ("out",)))
    return Iteration(tuple(tasks))


def ppo(generates="0-3", scores=("0-3/1",) * 3, trains=("0-3", "0-3"), blocks=("train", "train"), lags=(0, 0)):
    """PPO; `lags`: iterations between samples and the training of actor and critic."""
    names, weights = ("reference", "reward", "values"), ("", "", f"critic@{1 + lags[1]}")
    trained = zip(blocks, ("actor", "critic"), trains, lags)
    return table(
        f"rollout generation generate {generates} actor@1",
        *(f"rollout {name} score {mesh} generation:sample {own}" for name, mesh, own in zip(names, scores, weights)),
        f"rollout samples meet 0-3 generation {' '.join(names)}",
        "adv advantages host 0-3 samples",
        *(f"{block} {name} train {mesh} advantages@{lag} {name}@1" for block, name, mesh, lag in trained),
        "books books meet 0-3 actor@1 critic@1",
    )


SPLIT = {"trains": ("0-1", "2-3"), "blocks": ("train.a", "train.c")}
TAIL = (
    "rollout generation generate 0-3 step@1",
    "rollout rewards host 0-3/1 generation:sample",
    "rollout gradients train 0-3/2 rewards:group step@1",
    "step step train 0-3 gradients",
)
MANY = (
    "rollout generation generate 0-3 model.0@1",
    *(f"rollout score.{i} score 0-3/{1 + i % 2} generation:{'sample' if i < 4 else 'group'}" for i in range(6)),
    f"rollout samples meet 0-3 generation {' '.join(f'score.{i}' for i in range(6))}",
    *(f"train model.{i} train 0-3 samples model.{i}@1" for i in range(3)),
)
GOOD = {
    "today, fused": ppo(),
    "workers wider than instances": ppo(scores=("0-3/2", "0-3/1", "0-3/4")),
    "dedicated scorers": ppo(generates="0-2", scores=("3/1",) * 3),
    "scorers that join": ppo(generates="0-1"),
    "split training": ppo(**SPLIT),
    "interleaving 1": ppo(scores=("0-1/1", "2-3/2", "0-1/2")),
    "interleaving 2": ppo(scores=("0-1/1", "2-3/2", "2-3/1"), **SPLIT),
    "disaggregated": ppo(generates="0-1", scores=("0-1/1",) * 3, trains=("2-3", "2-3")),
    "one ahead": ppo(generates="0-1", scores=("0-1/1",) * 3, trains=("2-3", "2-3"), lags=(1, 1)),
    "critic across": ppo(generates="0-1", scores=("0-1/1",) * 3, lags=(0, 1), **SPLIT),
    "GRPO in the tail": table(*TAIL),
    "six scorers, three trained models": table(*MANY),
}
BAD = [  # a task, a word of the reason, whether ranks wait for ever, and the table
    ("a", "comes later", True, ["one a host 0-3 b", "two b host 0-3"]),
    ("b", "share all or none", True, ["one a train 0-2", "one b train 1-3"]),
    ("c", "cut across", False, ["one a generate 0", "one b score 1-6/2 a:sample", "one c score 1-6/3 a:sample"]),
    ("b", "cannot wait", True, ["one a generate 0-3", "one b score 0-3 a:sample"]),
    ("b", "not for a batch", False, ["one a generate 0-3", "one b score 0-3/1 a"]),
    ("b", "nothing before its end", False, ["one a train 0-3", "one b score 0-3/1 a:sample"]),
    ("b", "is no task", False, ["one a generate 0-3", "two b score 0-3/1 c"]),
    ("a", "another task", False, ["one a generate 0-3", "two a host 0-3"]),
    ("c", "entered twice", False, ["one a host 0", "two b host 1", "one c host 0"]),
    ("a", "ranks 0-3", False, ["one a generate 2-4"]),
    ("a", "do not divide", False, ["one a score 0-2/2"]),
    ("a", "drop its workers", False, ["one a generate 0-3/2"]),
    ("b", "a lag of -1", False, ["one a host 0-3", "two b host 0-3 a@-1"]),
]


def ends(iteration: Iteration, draw: random.Random) -> bool:
    run = IterationRun(iteration, WORLD, draw)
    return all(run.ends() for _ in range(INTERLEAVINGS))


def random_table(draw: random.Random) -> Iteration:
    names, tasks, block = [f"task{i}" for i in range(draw.randint(2, 5))], [], 0
    for number, name in enumerate(names):
        kind = draw.choice(KINDS) if number else "generate"
        mesh = draw.choice(("0-3",) * 6 + ("0-1", "2-3", "0-1", "2-3", "1-2", "3") + ("2-4",) * (draw.random() < 0.2))
        worker = draw.choice((0, 1, 1, 2)) if kind in ("score", "host") or draw.random() < 0.05 else 0
        block += number > 0 and draw.random() < (0.3 if worker else 0.7)
        takes = []
        for _ in range(draw.choice((0, 1, 1, 2)) if number else 0):
            giver = names[draw.randrange(number)] if draw.random() < 0.9 else draw.choice((*names, "none"))
            unit, lag = (
                draw.choice(UNITS[:2] if worker and draw.random() < 0.9 else UNITS),
                draw.choice((0,) * 9 + (1,)),
            )
            takes.append(Take("out", giver, unit, lag if draw.random() < 0.99 else -1))
        place, gives, turn = Mesh.parse(mesh), ("out",) * (draw.random() < 0.95), draw.random() < 0.03
        tasks.append(Task(name, kind, f"block{block}", place, worker, tuple(takes), gives, turn))
    return Iteration(tuple(tasks))


def test_random_tables_run_to_their_end_or_are_refused_by_the_name_of_a_call():
    draw, accepted = random.Random(7), 0
    for _ in range(RANDOM_TABLES):
        iteration = random_table(draw)
        try:
            iteration.verify(WORLD)
        except InputError as error:
            assert any(f"task {task.name}: " in str(error) for task in iteration.tasks), error
            continue
        accepted += 1
        assert ends(iteration, draw), "\n".join(iteration.lines())
    assert RANDOM_TABLES / 4 < accepted < RANDOM_TABLES * 3 / 4


@pytest.mark.parametrize("name", GOOD)
def test_placements_of_the_papers_run_to_their_end(name):
    assert ends(GOOD[name].verify(WORLD), random.Random(1))
    assert from_json(Iteration, to_json(GOOD[name]), "a table") == GOOD[name]


@pytest.mark.parametrize("task, reason, hangs, rows", BAD)
def test_a_refused_table_names_its_call(task, reason, hangs, rows):
    with pytest.raises(InputError, match=f"task {task}: .*{reason}"):
        table(*rows).verify(7 if "1-6" in rows[-1] else WORLD)
    if hangs:  # each rank takes tasks of a block in an order of its own
        assert not all(ends(table(*rows), random.Random(seed)) for seed in range(8))


@pytest.mark.parametrize("layouts, calls_function", [(PPO, True), (PPO, False), (LAYOUTS, True)])
def test_the_iteration_that_runs(layouts, calls_function):
    parsed = {name: ParallelLayout.parse(text) for name, text in layouts.items()}
    models = [ModelTask.of(name, layout, WORLD) for name, layout in parsed.items()]
    iteration = Iteration.of(models, calls_function).verify(WORLD)
    assert ends(iteration, random.Random(2)) and iteration.refuse_unless(iteration) is iteration
    assert from_json(Iteration, to_json(iteration), "plan") == iteration
    assert {task.name: task.layout for task in iteration.models} == parsed
    every = [block.name for block in iteration.program(3) if not block.on_turn]
    assert every == ["reshard", "gen_infer", "adv", "train", "books"]
    assert iteration.lines()[0].split()[:4] == ["reshard", "actor_move", "move", layouts["generation"]]


def test_other_tables_are_not_executable_yet():
    today = ppo()
    with pytest.raises(InputError, match="task generation: not executable yet"):
        GOOD["disaggregated"].verify(WORLD).refuse_unless(today)
    with pytest.raises(InputError, match="task books: not executable yet"):
        Iteration(today.tasks[:-1]).refuse_unless(today)


def test_a_mesh_is_written_as_ranges():
    assert [str(Mesh.parse(text)) for text in ("0-3", "2", "0-1,4-6,9", "0,1,2")] == ["0-3", "2", "0-1,4-6,9", "0-2"]
    for text in ("", "3-1", "0-3,2", "a", "0-9999999"):
        with pytest.raises(InputError, match="mesh"):
            Mesh.parse(text)
