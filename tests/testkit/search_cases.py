"""Runs whose layouts are searched: random ones, all their tables priced one by one, and small ones, ranked once."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

from cost_profiles.measured_grid import grid_of

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.fits import Grid
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.profile_files import TensorProfiles
from rlhfuse.costs.profiled import ProfiledCost, TrainingGrids, made_for
from rlhfuse.decisions.batch_arithmetic import resolve_batch
from rlhfuse.decisions.layout_rules import LayoutRules
from rlhfuse.decisions.layouts import given_tasks
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.job import Job
from rlhfuse.planning.price import Moves, Price, price, price_generation, weight_moves
from rlhfuse.planning.search.search import Ranking, Row, check_headroom
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.space import Space
from rlhfuse.planning.search.table import NUMBER, TOKENS, CutSetting, Table
from rlhfuse.planning.settle import settle_but_layouts
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.task import SCORERS
from testkit.four_ranks import SPECS, config, drafted

ROWS = ("generation", "inference", *SCORERS)
TRAINED = ("actor_train", "critic_train")
OPEN = {f"parallel__{row}": AUTO for row in (*ROWS, *TRAINED, "sequence_parallel")}
OPEN |= {"fusion__microbatch_tokens": AUTO, "fusion__actor_microbatches": AUTO}
PROMPT, RESPONSE = 64, 192  # tokens, at most
GPUS = {"trainer__device": "cuda", "trainer__hardware": "h100"}


@dataclass(frozen=True)
class SearchCase:
    """What a search is asked."""

    config: RunConfig
    specs: dict[str, ModelSpec]
    world_size: int
    lengths: SampleLengths | None

    @property
    def setting(self) -> Setting:
        config = resolve_batch(resolve_device(self.config))  # rows that cannot be are in it too
        return Setting.of(Job(self.config, self.specs, self.world_size).with_config(config), self.lengths)


@dataclass(frozen=True)
class PricedTable:
    table: Table
    draft: Candidate
    price: Price


def auto_config(**keys) -> RunConfig:
    """A run whose layouts, micro-batches and recomputation are all searched but for these keys."""
    base = {
        "trainer__recompute": AUTO,
        "algorithm__minibatches": 2,
        "data__max_prompt_tokens": PROMPT,
        "rollout__max_response_tokens": RESPONSE,
        "rollout__samples_per_prompt": 1,
        "rollout__prompts_per_iteration": 16,
        "parallel__headroom": 0.0,
    }
    return config(**{**OPEN, **base, **keys})


def spec_of(layers: int, hidden: int, heads: int, kv_heads: int, vocab: int = 2048, tied: bool = False) -> ModelSpec:
    return ModelSpec("llama", layers, hidden, heads, kv_heads, hidden // heads, 3 * hidden, vocab, 2048, tied)


def long_tail(rng: random.Random, count: int = 40) -> SampleLengths:
    outputs = tuple(min(RESPONSE, max(1, round(rng.lognormvariate(3, 1.2)))) for _ in range(count))
    return SampleLengths(tuple(rng.randint(4, PROMPT) for _ in range(count)), outputs)


def random_specs(rng: random.Random, critic: bool = True) -> dict[str, ModelSpec]:
    vocab = rng.choice((512, 8192))

    def one() -> ModelSpec:
        heads = rng.choice((2, 4, 8, 12))
        kv_heads = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
        own = vocab if rng.random() < 0.9 else 4096
        return spec_of(
            rng.choice((1, 2, 3, 4, 8)), rng.choice((64, 128)) * heads, heads, kv_heads, own, rng.random() < 0.3
        )

    actor = one()
    critics = {"critic": one(), "reward": one()} if critic else {}
    return {"actor": actor, "reference": actor, **critics}


def random_case(seed: int, world_sizes: tuple[int, ...] = (4, 4, 4, 8), most_tables: int = 100) -> SearchCase:
    """Now and then without a critic, in an order by rule, with split backwards, without fusion between stages, or with
    little memory; rows are given until no more tables are left than `most_tables`, and then now and then some more."""
    rng = random.Random(seed)
    world, critic = rng.choice(world_sizes), rng.random() < 0.75
    keys: dict[str, object] = {
        "trainer__hardware": rng.choice(("cpu", "cpu", "h100", "a100", "h800")),
        "trainer__host_memory_gb": 500.0,
        "algorithm__minibatches": rng.choice((1, 2)),
        "rollout__prompts_per_iteration": rng.choice((8, 8, 16, 12)) * (2 if world == 16 else 1),
        "fusion__inter_stage": rng.random() < 0.8,
        "fusion__intra_stage": rng.choice(("search",) * 4 + ("serial", "time_sharing")),
        "parallel__headroom": rng.choice((0.0, 0.0, 0.1, 0.25)),
        "parallel__stage_layers": rng.choice(("auto", "even")),
        "rollout__max_sequences_per_instance": rng.choice((4, 256)),
        "rollout__max_batched_tokens": rng.choice((256, 1024)),
    }
    keys["fusion__split_backward"] = random.Random(f"split {seed}").choice(("auto", "false", "true"))
    if not critic:
        keys |= {"algorithm__name": "grpo", "reward__function": "m:f"}
    lengths = long_tail(rng) if rng.random() < 0.75 else None
    if lengths is not None and rng.random() < 0.2:
        keys["fusion__threshold"] = rng.choice((0, 2, 4))
    case = SearchCase(auto_config(**keys), random_specs(rng, critic), world, lengths)
    while not has_tables(case):  # such as few heads, few layers and few samples
        case = replace(case, specs=random_specs(rng, critic))
    case = with_little_memory(case, rng) if rng.random() < 0.7 else case
    case = with_given_rows(case, rng) if rng.random() < 0.3 else case
    while count_tables(case) > most_tables:
        case = with_given_rows(case, rng)
    return case


def with_given_rows(case: SearchCase, rng: random.Random) -> SearchCase:
    """With some rows of a table of its space."""
    space, groups = space_of_setting(case.setting), {"parallel": {}, "fusion": {}, "trainer": {}}
    drawn = [drawn_table(space, rng) for _ in range(200)]
    table = next((table for table in drawn if may_run(case, table)), drawn[0])
    for word in table.overrides():
        group, _, rest = word.partition(".")
        name, _, value = rest.partition("=")
        if rng.random() < 0.3:
            groups[group][name] = int(value) if value.isdigit() else value
    if "inference" in groups["parallel"]:
        groups["parallel"] |= {row: str(layout) for row, layout in table.inference}
    if "sequence_parallel" in groups["parallel"]:
        groups["parallel"]["sequence_parallel"] = table.sequence_parallel
    return replace(case, config=case.config.with_(**groups))


def may_run(case: SearchCase, table: Table) -> bool:
    """By the rules that a run is held against."""
    try:
        LayoutRules(table.of(case.setting.run.config), case.specs, case.world_size).table()
    except InputError:
        return False
    return True


def has_tables(case: SearchCase) -> bool:
    try:
        return count_tables(case) > 0
    except InputError:
        return False


def count_tables(case: SearchCase) -> int:
    space = space_of_setting(case.setting)
    return len(space.training) * len(space.generation)


def drawn_table(space: Space, rng: random.Random) -> Table:
    return space.table(rng.randrange(len(space.training)), rng.randrange(len(space.generation)))


def space_of_setting(setting: Setting) -> Space:
    devices = setting.inputs.hardware.devices_per_node
    return Space.of(setting.run, devices, setting.given, setting.inputs.drawn)


def with_little_memory(case: SearchCase, rng: random.Random) -> SearchCase:
    """As much as one of its tables needs, of some that are drawn."""
    setting = with_memory(case, 1000.0).setting
    space, needs = space_of_setting(setting), []
    for _ in range(6):
        try:
            draft = setting.draft(drawn_table(space, rng))
        except InputError:
            continue
        needs.append(draft.memory.needed(draft.memory.fullest(min_memory(draft.training.problem))))
    if not needs:
        return case
    return with_memory(
        case, rng.choice(needs) * rng.choice((0.9, 1.001, 1.2)) / (1 - case.config.parallel.headroom) / 1e9
    )


def with_memory(case: SearchCase, gigabytes: float) -> SearchCase:
    """With no more than a GPU has."""
    trainer = case.config.trainer
    machine = hardware_by_name(trainer.hardware, trainer.device, case.world_size)
    most = machine.memory_bytes / 1e9 if machine.device.own_memory else gigabytes
    return replace(case, config=case.config.with_(trainer={"memory_limit_gb": min(gigabytes, most)}))


def table_of(overrides: Sequence[str]) -> Table:
    """Inverse of `Table.overrides`."""
    rows = dict(word.split("=", 1) for word in overrides)
    layouts = {key.partition(".")[2]: ParallelLayout.parse(text) for key, text in rows.items() if "d" in text}
    generation, actor, critic = (layouts.get(name) for name in ("generation", "actor_train", "critic_train"))
    scored = tuple((row, layouts.get(row, layouts.get("inference"))) for row in SCORERS)
    recompute, sharded = rows["trainer.recompute"], rows["parallel.sequence_parallel"] == "true"
    cut = next(CutSetting(name, int(rows[f"fusion.{name}"])) for name in (TOKENS, NUMBER) if f"fusion.{name}" in rows)
    return Table(generation, scored, actor, critic, cut, recompute, sharded)


def profiles_of(case: SearchCase, rng: random.Random) -> TensorProfiles:
    """As tools/profile_costs.py writes them for this run: grids that ascend, in no other order."""

    def grid(*axes: tuple[float, ...], scale: float) -> Grid:
        points = list(product(*axes))
        base = {
            point: scale * (0.2 + rng.random() + sum(c / axis[-1] for c, axis in zip(point, axes))) for point in points
        }
        return grid_of(axes, base)

    tokens, few = (16.0, 100.0, 700.0), (1.0, 3.0, 9.0)
    made = []
    for degree in rng.choice(((1, 2), (1, 2, 4))):
        rows = {row: f"d1t{degree}p1" for row in (*ROWS, *TRAINED)} | {"sequence_parallel": False}
        settled = {"fusion": {"actor_microbatches": 1}, "trainer": {"recompute": "none"}}
        known = resolve_device(case.config.with_(parallel=rows, **settled))
        scales = (2e-3, 4e-3, 1e-3, 2e-3, 2.5e-3, 2e-3)[: 4 if rng.random() < 0.2 else 6]  # now and then no split ones
        training = {
            role: TrainingGrids(degree, *(grid(tokens, scale=scale) for scale in scales)) for role in known.trained()
        }
        made.append(
            ProfiledCost(
                made_for=made_for(known.trainer, given_tasks(known.parallel, known.roles(), degree), case.specs),
                decode=grid(few, (8.0, 60.0, 300.0), scale=1e-3),
                prefill=grid(tokens, few, scale=1e-3),
                score={role: grid(tokens, few, scale=2e-3) for role in known.scorers()},
                swap_in=rng.random() * 1e-3,
                move=grid((1e3, 1e6), scale=1e-4),
                all_reduce=None,
                training=training,
            )
        )
    return TensorProfiles(tuple(made))


def with_profiles(case: SearchCase, file: Path, seed: int) -> SearchCase:
    """With measured costs, which are written to `file`."""
    write_json(file, profiles_of(case, random.Random(seed)).to_dict())
    opened = {"parallel": {"sequence_parallel": AUTO}, "trainer": {"recompute": AUTO}}
    return replace(case, config=case.config.with_(fusion={"profile": str(file)}, **opened))


def priced_tables(case: SearchCase) -> list[PricedTable]:
    """Every table of the space that can run with its price, the fastest first; each is drafted as a run of it is."""
    made, generated = [], {}
    for table in tables_of(space_of_setting(case.setting)):
        try:
            draft = drafted(table.of(case.config), case.specs, case.world_size, case.lengths)
            check_headroom(draft)
        except InputError:
            continue
        key = str(table.generation), table.inference, draft.generation.limits
        if key not in generated:
            generated[key] = price_generation(draft)
        moves = Moves.of(weight_moves(draft))
        made.append(PricedTable(table, draft, price(draft, generated[key], moves)))
    return sorted(made, key=lambda one: (one.price.seconds, one.table.text))


def tables_of(space: Space) -> Iterator[Table]:
    for training, generation in product(range(len(space.training)), range(len(space.generation))):
        yield space.table(training, generation)


def everything(**keys):
    """A run of few samples in which all that a search decides is auto, unless `keys` say it."""
    few = {"rollout__prompts_per_iteration": 4, "rollout__samples_per_prompt": 1, "algorithm__minibatches": 1}
    return config(**{**OPEN, "trainer__recompute": AUTO, **few, **keys})


def setting(world_size: int = 2, specs=SPECS, **keys) -> Setting:
    return Setting.of(settle_but_layouts(Job(everything(**keys), specs, world_size)))


@cache
def known(world_size: int = 2, **keys) -> tuple[Setting, list[Row]]:
    """A setting and every table that fits, ranked once by a search that has answered nothing else."""
    made = setting(world_size, **keys)
    return made, [row for row, _ in Ranking(made).ranked()]


def with_price(row: Row, seconds: float, needed_bytes: float) -> Row:
    """As it is, with that price in all."""
    return replace(
        row, price=replace(row.price, schedules=row.price.schedules + seconds - row.seconds), needed_bytes=needed_bytes
    )
