"""What a search of layouts found, for people and as search.json: the best tables, the proof that none is faster, what
it costs to insist, memory against time, and how sure all that is.

Two searches of the same say the same to the last byte.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from layout_search.wishes import Wish, wishes
from text_table import aligned

from rlhfuse.planning.price import CAPTURE, GENERATION, MOVES, OFFLOAD, SCHEDULES, STEPS
from rlhfuse.planning.search.search import FastestTables, Ranking, Row
from rlhfuse.planning.search.table import inference_text
from rlhfuse.planning.training.training_problem import equal_microbatch
from rlhfuse.tasks.task import TRAINED

VERSION = 2
PHASES = {  # columns of the table, and the parts of a price that each sums
    "gen+inf": (GENERATION,),
    "train": (SCHEDULES, STEPS),
    "moves": (MOVES,),
    "other": (OFFLOAD, CAPTURE),
}
HEAD = ("", "seconds", "bound", *PHASES, "peak GiB", "phase", "generation", "inference", *TRAINED)
HEAD += ("cut", "recompute", "sequence_parallel")
LEFT = range(HEAD.index("phase"), len(HEAD))  # columns that begin at the left


@dataclass(frozen=True)
class SearchAnswer:
    """The fastest tables; `lengths`: a line on those that it was searched for. `priced`: all rows that were."""

    fastest: FastestTables
    lengths: str
    wishes: tuple[Wish, ...]
    priced: tuple[Row, ...]
    doubts: tuple[str, ...]

    @property
    def curve(self) -> tuple[Row, ...]:
        return memory_curve(self.priced)

    def render(self) -> str:
        lines = [*header(self.fastest), self.lengths, *proof(self.fastest), *best_tables(self.fastest.rows)]
        lines += [*wishes_table(self.wishes), curve_line(self.curve)]
        return "\n".join((*lines, "sure of it?", *(f"  {doubt}" for doubt in self.doubts)))

    def to_dict(self) -> dict[str, Any]:
        """search.json."""
        fastest = self.fastest
        return {
            "version": VERSION,
            "world_size": fastest.world_size,
            "hardware": fastest.hardware,
            "lengths": self.lengths,
            "training_rows": fastest.training_rows,
            "generation_rows": fastest.generation_rows,
            "tables": [row_to_dict(row) for row in fastest.rows],
            "refused": dict(fastest.refused),
            "reached": None if fastest.reached == inf else fastest.reached,
            "bound": None if fastest.bound == inf else fastest.bound,
            "priced": fastest.priced,
            "drafted": fastest.drafted,
            "wishes": [{**wish.to_dict(), "table": row_to_dict(wish.row)} for wish in self.wishes],
            "memory": [{"needed_bytes": row.needed_bytes, "seconds": row.seconds} for row in self.curve],
            "doubts": list(self.doubts),
        }


def answer_of(ranking: Ranking, fastest: FastestTables) -> SearchAnswer:
    """`fastest`: of `ranking`."""
    tables, told = {row.table for row in fastest.rows}, ranking.setting.inputs.lengths.told
    rows = (*fastest.rows, *(row for row in ranking.priced if row.table not in tables))
    wanted = tuple(wishes(ranking, fastest.best))
    return SearchAnswer(fastest, told, wanted, rows, doubts_of(ranking, fastest))


def overrides(row: Row) -> list[str]:
    """Arguments that give a run this table, whatever layouts its file has."""
    return ["parallel=auto", *row.table.overrides()]


def row_to_dict(row: Row) -> dict[str, Any]:
    """Seconds and bytes are not rounded."""
    return {
        "overrides": overrides(row),
        "seconds": row.seconds,
        "bound": row.bound,
        "parts": dict(row.price.parts),
        "needed_bytes": row.needed_bytes,
        "limit_bytes": row.limit_bytes,
        "fullest_phase": row.fullest.phase,
    }


def header(fastest: FastestTables) -> tuple[str, ...]:
    tables = f"{fastest.training_rows:,} training tables x {fastest.generation_rows} of generation and inference"
    return (f"searched {tables} on {fastest.world_size} {fastest.hardware}",)


def proof(fastest: FastestTables) -> tuple[str, ...]:
    """What was refused, what was looked at how closely, and why no other table can be among the best."""
    counts = ", ".join(f"{count:,} {rule}" for rule, count in fastest.refused.items())
    looked = f"  priced exactly: {fastest.priced}; memory checked: {fastest.drafted}"
    if fastest.bound == inf:
        return f"  refused: {counts or 'none'}", f"{looked}; no other table fits"
    reached = f"{looked}; others reach {fastest.reached:.4g} s or more: none that was reached is faster than these"
    bound = f"  all others have a bound of {fastest.bound:.4g} s or more: none takes less, however it is searched"
    return f"  refused: {counts or 'none'}", reached, bound


def best_tables(rows: Sequence[Row]) -> list[str]:
    """A line for each, the fastest first: seconds of an iteration as reached, and at the bound of its schedule."""
    return aligned([HEAD, *(_cells(number, row) for number, row in enumerate(rows, start=1))], LEFT)


def wishes_table(wanted: Sequence[Wish]) -> list[str]:
    """What each costs, and the part of the price that grows most."""
    lines = [("if you insist on", "it costs at most", "because")]
    for wish in wanted:
        why = "one of the best"
        if wish.because:
            name, seconds, least = wish.because
            why = f"{name} {seconds:.3g} s instead of {least:.3g}"
        lines.append((wish.wanted, f"{wish.cost:+.1%}", why))
    return aligned(lines)


def curve_line(curve: Sequence[Row]) -> str:
    points = " | ".join(f"{gibibytes(row.needed_bytes)} GiB {row.seconds:.4g} s" for row in curve)
    return f"memory against time, of the tables priced: {points}"


def doubts_of(ranking: Ranking, fastest: FastestTables) -> tuple[str, ...]:
    """How near the second is, and what of the costs was measured."""
    if len(fastest.rows) > 1:
        following = f"best and second differ by {fastest.rows[1].seconds / fastest.best.seconds - 1:.1%}"
    else:
        following = "no other table fits" if fastest.bound == inf else f"others reach {fastest.reached:.4g} s or more"
    return following, f"{_measured(ranking)}{_beyond(ranking, fastest.best)}", *ranking.setting.notes


def _measured(ranking: Ranking) -> str:
    """What lies outside of it."""
    space, measured = ranking.space, ranking.setting.inputs.measured
    profile = ranking.setting.run.config.fusion.profile
    rows = [layout for row in space.generation for layout in (row.generation, *dict(row.inference).values())]
    rows += [layout for row in space.training for layout in (row.actor, row.critic) if layout]
    degrees = sorted({layout.tp for layout in rows})
    if measured is None:
        words = ",".join(map(str, degrees))
        fix = f"tools/profile_costs.py --tensor {words} measures them for fusion.profile"
        return f"nothing was measured, all costs are analytic; {fix}"
    if not measured.degrees:
        return f"costs are those of fusion.profile={profile}; start-ups and links beside them are analytic"
    known = ", ".join(map(str, measured.degrees))
    missing = [str(degree) for degree in degrees if degree not in measured.degrees]
    if not missing:
        return f"fusion.profile={profile} has every tensor degree of these tables: {known}"
    count = ranking.refused["not measured"]
    return f"fusion.profile={profile} has tensor degrees {known}: {count:,} tables with {', '.join(missing)} left out"


def _beyond(ranking: Ranking, best: Row) -> str:
    """What of the best table is larger than anything that was measured, where a profile says what was."""
    measured, draft = ranking.setting.inputs.measured, ranking.setting.draft(best.table)
    if measured is None:
        return ""
    limits, shares = draft.generation.limits, draft.ranks.shape.shares
    sequences = min(limits.max_sequences, draft.batch.samples_per_instance)
    pack = min(sequences * limits.longest, max(limits.score_tokens, limits.longest))
    rung = draft.training.likeliest
    training = {share.model: equal_microbatch(draft.inputs.drawn, draft.batch, rung, share).tokens for share in shares}
    outside = measured.of(draft.tasks).beyond(sequences, limits.longest, pack, training)
    return f"; beyond what was measured the best table has {', '.join(outside)}" if outside else ""


def by_phase(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the columns."""
    return {phase: sum(parts[name] for name in names) for phase, names in PHASES.items()}


def gibibytes(count: float) -> str:
    return f"{count / 2**30:.3g}"


def _cells(number: int, row: Row) -> tuple[str, ...]:
    table, seconds = row.table, by_phase(row.price.parts).values()
    layouts = table.generation, inference_text(table.inference), table.actor_train, table.critic_train or "-"
    return (
        str(number),
        f"{row.seconds:.4g}",
        f"{row.bound:.4g}",
        *(f"{part:.3g}" for part in seconds),
        gibibytes(row.needed_bytes),
        row.fullest.phase,
        *map(str, layouts),
        str(table.cut),
        table.recompute,
        str(table.sequence_parallel).lower(),
    )


def memory_curve(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The fastest first; each next one needs less of a rank."""
    curve: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, row.needed_bytes, row.table.text)):
        if not curve or row.needed_bytes < curve[-1].needed_bytes:
            curve.append(row)
    return tuple(curve)


def draw_memory_curve(rows: Sequence[Row], curve: Sequence[Row]) -> bytes:
    """A PNG with the curve before all priced tables."""
    from matplotlib import rc_context  # takes a second that a search without a picture need not wait for
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(7, 4.5), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        axes.scatter(*_points(rows), s=12, color="#9ecae1", label="priced")
        axes.plot(*_points(curve), drawstyle="steps-post", marker="o", color="#08519c", label="none is better in both")
        for number, row in enumerate(curve, start=1):
            place = row.needed_bytes / 2**30, row.seconds
            axes.annotate(str(number), place, xytext=(0, -11), textcoords="offset points", ha="center")
            axes.plot([], [], " ", label=f"{number}  {_short(row)}")
        axes.set_xlabel("peak memory of a rank, GiB")
        axes.set_ylabel("predicted seconds of an iteration")
        axes.legend(frameon=False, fontsize=7)
        axes.margins(0.15)
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row.needed_bytes / 2**30 for row in rows], [row.seconds for row in rows]


def _short(row: Row) -> str:
    table = row.table
    return f"{table.generation} / {table.actor_train} {table.critic_train or ''}".strip()
