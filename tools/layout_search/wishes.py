"""What it costs to insist on something: the fastest table that has it, with everything else chosen anew.

A wish that another value of one decision grants is asked of the search that is there, which knows most of the answer;
one that changes the price or the memory of every table is searched on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig
from rlhfuse.planning.search.search import Allowed, Ranking, Row
from rlhfuse.planning.search.setting import Setting
from rlhfuse.planning.search.space import GenerationRow, TrainingRow

DECISIONS: Mapping[str, Callable[[TrainingRow, GenerationRow], Any]] = {
    "generation": lambda training, decoding: decoding.generation,
    "inference": lambda training, decoding: decoding.inference,
    "actor_train": lambda training, decoding: training.actor,
    "critic_train": lambda training, decoding: training.critic,
    "microbatch_tokens": lambda training, decoding: training.cut.value,
    "recompute": lambda training, decoding: training.recompute,
    "sequence_parallel": lambda training, decoding: training.sequence_parallel,
}
SERIAL, BY_RULE = "serial (no fusion)", "by rule"
RULE_DEPTHS = (4, 8, 16)  # of pipelines, as runs of this kind are laid out by hand; RLHFuse section 7 among them
LESS_MEMORY = (0.9, 0.75, 0.6)  # of what the best table needs


@dataclass(frozen=True)
class Wish:
    """`row`: the fastest table that has what is `wanted`; None: none fits. `best`: of all tables."""

    wanted: str
    best: Row
    row: Row | None

    @property
    def cost(self) -> float | None:
        """Seconds of an iteration more, as a share of the best's."""
        return self.row.seconds / self.best.seconds - 1 if self.row else None

    @property
    def because(self) -> tuple[str, float, float] | None:
        """The part of the price that grows most, its seconds, and those of the best; None: none grows."""
        if self.row is None:
            return None
        parts, least = self.row.price.parts, self.best.price.parts
        name = max(parts, key=lambda part: parts[part] - least[part])
        return (name, parts[name], least[name]) if parts[name] > least[name] else None

    def to_dict(self) -> dict[str, Any]:
        return {"wanted": self.wanted, "cost": self.cost, "because": self.because}


def cheap_wishes(ranking: Ranking, best: Row) -> tuple[Wish, ...]:
    """Another value of each decision that is open, and layouts by rule; the search knows most of the answer."""
    return tuple(filter(None, (*one_changes(ranking, best), by_rule(ranking, best))))


def dear_wishes(setting: Setting, best: Row) -> tuple[Wish, ...]:
    """No fusion, and less memory: each is a search of its own."""
    return tuple(filter(None, (serial(setting, best), *less_memory(setting, best))))


def one_changes(ranking: Ranking, best: Row) -> Iterator[Wish]:
    """For each decision with more than one value, the fastest table with another than the best's."""
    some_training, some_generation = ranking.space.training[0], ranking.space.generation[0]
    for name, value in DECISIONS.items():
        chosen = _value(name, best)
        values = {value(row, some_generation) for row in ranking.space.training}
        values |= {value(some_training, row) for row in ranking.space.generation}
        if values == {chosen}:
            continue
        row = _first(ranking, lambda training, decoding: value(training, decoding) != chosen)
        yield Wish(f"{name}={_word(_value(name, row))}" if row else f"{name} other than {_word(chosen)}", best, row)


def by_rule(ranking: Ranking, best: Row) -> Wish | None:
    """As many tensor ranks as fit in a node for every task, no virtual stages, and the shallowest pipelines of 4, 8
    or 16 stages that fit: the usual table of a run that is laid out by hand. None: there are none such."""
    space = ranking.space
    most = [max(layouts[at].tp for layouts in map(_trained, space.training)) for at in (0, -1)]
    decoding = max(space.generation, key=_decoding_degrees)
    asked = False
    for depth in RULE_DEPTHS:

        def trains_so(row: TrainingRow) -> bool:
            layouts = _trained(row)
            degrees = [layouts[at].tp for at in (0, -1)]
            return degrees == most and all((layout.pp, layout.chunks) == (depth, 1) for layout in layouts)

        asked = asked or any(map(trains_so, space.training))
        row = _first(ranking, lambda training, generation: generation == decoding and trains_so(training))
        if row:
            return Wish(f"{BY_RULE} (most tensor ranks, pp {depth})", best, row)
    return Wish(f"{BY_RULE} (most tensor ranks, pp 4, 8 or 16)", best, None) if asked else None


def serial(setting: Setting, best: Row) -> Wish | None:
    """One stage and one model after the other, with the layouts that are best for that. None: it is so already."""
    fusion = {"inter_stage": False, "intra_stage": "serial"}
    config = setting.config.with_(fusion=fusion)
    if config == setting.config:
        return None
    return Wish(SERIAL, best, _searched(with_config(setting, config)))


def less_memory(setting: Setting, best: Row) -> Iterator[Wish]:
    """With less of every rank than the best table needs."""
    for share in LESS_MEMORY:
        limit = float(f"{share * best.needed_bytes / 1e9:.2g}")
        yield Wish(f"trainer.memory_limit_gb={limit:g}", best, _searched(limited(setting, limit)))


def limited(setting: Setting, gigabytes: float) -> Setting:
    """The same where a rank may use so many 10^9 bytes."""
    return with_config(setting, setting.config.with_(trainer={"memory_limit_gb": gigabytes}))


def with_config(setting: Setting, config: RunConfig) -> Setting:
    return replace(setting, run=setting.run.with_config(config))


def _searched(setting: Setting) -> Row | None:
    try:
        return _first(Ranking(setting))
    except InputError:  # no rows at all
        return None


def _first(ranking: Ranking, allowed: Allowed | None = None) -> Row | None:
    return next((row for row, _ in ranking.ranked(allowed)), None)


def _trained(row: TrainingRow) -> tuple[ParallelLayout, ...]:
    return (row.actor, row.critic) if row.critic else (row.actor,)


def _decoding_degrees(row: GenerationRow) -> tuple[int, int]:
    return row.generation.tp, row.inference.tp


def _value(name: str, row: Row) -> Any:
    return row.table.cut.value if name == "microbatch_tokens" else getattr(row.table, name)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
