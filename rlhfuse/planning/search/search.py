"""The fastest tables as reached: best first, every table by a floor of its price until no other can be faster.

A table takes nine steps, each with a higher floor: mean work of a node; work of every node; weights moved; work with
backwards split as they may be; their order too; generation simulated in all room; in the room there is; the proved
bound of training; and its schedule as reached by rule. Whichever has the lowest floor takes its next step, so tables
come out in the order of their price, then of their text (RLHFuse section 6 and REAL's plan search, exactly).
"""

from __future__ import annotations

import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from math import inf
from operator import itemgetter
from statistics import fmean

from rlhfuse.base.errors import InputError
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.base.remembered import remembered
from rlhfuse.config.auto_layouts import auto_layouts
from rlhfuse.costs.machine import memory_limit
from rlhfuse.planning.candidate import Candidate
from rlhfuse.planning.graph_capture import graph_capture
from rlhfuse.planning.memory.memory_budget import KEEPING_PART, MemoryRefusal, PhaseMemory
from rlhfuse.planning.price import (
    GenerationPrice,
    Moves,
    Price,
    bound_seconds,
    ideal_limits,
    price,
    simulate_generation,
    with_schedules,
)
from rlhfuse.planning.search.floors import Problems, TrainingFloors, generation_floor, work_bound
from rlhfuse.planning.search.setting import GenerationBytes, Setting
from rlhfuse.planning.search.space import GenerationRow, Space, TrainingRow
from rlhfuse.planning.search.table import Table
from rlhfuse.schedule.bounds.bounds import quick_bound
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.tasks.instance_limits import InstanceLimits

TOP = 5
CLOSEST = 50  # training rows that are drafted to find which table lacks least, where none fits
LEANEST = 12  # tables that are drafted to find whether any has room
MORE = "tools/plan.py says how many ranks have room"
WORTH_REACHING = 0.01  # of what a table takes as reached: another's floor must be lower by it to be reached too
QUIET_SECONDS = 3.0  # after which a search says how far it is
ROUNDING = 1e-12  # of seconds: floors and prices add the same numbers up in other orders
Allowed = Callable[[TrainingRow, GenerationRow], bool]


@dataclass(frozen=True)
class Row:
    """A table that fits, its price with training as reached, its seconds at the bound of training, and the phase that
    fills a rank most with what was reached."""

    table: Table
    price: Price
    bound: float
    fullest: PhaseMemory
    needed_bytes: float
    limit_bytes: float

    @property
    def seconds(self) -> float:
        return self.price.seconds


@dataclass(frozen=True)
class FastestTables:
    """The best rows, first the fastest as reached; of the others those that were reached take `reached` seconds or
    more, and none, however its schedule is searched, takes less than `bound`.

    `refused`: tables that cannot run, by rule, of those that were looked at; `drafted`: whose memory was checked;
    `priced`: whose training schedule was reached.
    """

    world_size: int
    hardware: str
    training_rows: int
    generation_rows: int
    rows: tuple[Row, ...]
    reached: float
    bound: float
    refused: Mapping[str, int]
    drafted: int
    priced: int

    @property
    def best(self) -> Row:
        return self.rows[0]

    def __str__(self) -> str:
        """The winner in a line, and the proof in another."""
        tables = f"{self.training_rows:,} training tables x {self.generation_rows} of generation"
        others = f"others reach {self.reached:.4g} s or more, all have a bound of {self.bound:.4g} s or more"
        proof = "no other table fits" if self.bound == inf else others
        return (
            f"the fastest as reached, by predicted seconds, of {tables} on {self.world_size} {self.hardware}\n"
            f"{self.priced} priced exactly, {self.drafted} drafted; {proof}"
        )


class Ranking:
    """Tables of a setting in the order of their price; what one question has computed the next one uses."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        hardware, config = setting.inputs.hardware, setting.run.config
        self.space = Space.of(setting.run, hardware.devices_per_node, setting.given, setting.inputs.drawn)
        limit, _ = memory_limit(config.trainer, hardware, setting.run.world_size, setting.run.host)
        self.headroom_bytes = limit * config.parallel.headroom  # of a rank
        self.limit = limit - self.headroom_bytes - hardware.process_bytes
        self.keeping_limit = min(self.limit, KEEPING_PART * limit - hardware.process_bytes)
        self.refused = Counter(self.space.refused)
        self._said: dict[str, str] = {}  # by rule that refuses, the first error
        self._floors = TrainingFloors(setting)
        self._generation_bytes: list[GenerationBytes | None] = [None] * len(self.space.generation)
        self._generation_floors = [self._generation_floor(number) for number in range(len(self.space.generation))]
        self._training_floors = [self._training_floor(row) for row in self.space.training]
        self._captures = [0.0] * len(self.space.generation)  # seconds of an iteration that records graphs
        self._works: dict[int, float | None] = {}
        self._unscheduled: dict[int, InputError] = {}
        self._held: dict[int, float] = {}
        self._drafts: dict[tuple[int, int], Candidate | None] = {}
        self._generated: dict[tuple[int, InstanceLimits], GenerationPrice] = {}
        self._rows: dict[tuple[int, int], Row] = {}
        self._lacking: list[tuple[float, str, Table, str, str]] = []

    def fastest(self, top: int) -> FastestTables:
        """Raises InputError where nothing fits."""
        ranked = [row for row, _ in islice(self.ranked(), top + 1)]
        if not ranked:
            raise self._nothing_fits()
        rows = sorted(self.priced, key=lambda row: (row.seconds, row.table.text))[:top]
        least = ranked[top].seconds * (1 - WORTH_REACHING) if len(ranked) > top else inf  # of all that was not reached
        others = [row for row in self.priced if row not in rows]
        return FastestTables(
            self.setting.run.world_size,
            self.setting.inputs.hardware.name,
            len(self.space.training),
            len(self.space.generation),
            tuple(rows),
            min((row.seconds for row in others), default=inf),
            min([least, *(row.bound for row in others)]),
            dict(sorted(self.refused.items())),
            len(self._drafts),
            len(self._rows),
        )

    @property
    def priced(self) -> tuple[Row, ...]:
        """All that any question has reached until now."""
        return tuple(self._rows.values())

    def ranked(self, allowed: Allowed | None = None) -> Iterator[tuple[Row, int]]:
        """The tables whose rows are `allowed`, the fastest of those that were reached first, each with how many were
        until then; none that was not can be faster by WORTH_REACHING."""
        queue = [
            ((training + generation) * (1 - ROUNDING), 0, t, g)
            for t, training in enumerate(self._training_floors)
            if training is not None
            for g, generation in enumerate(self._generation_floors)
            if generation is not None and (not allowed or allowed(self.space.training[t], self.space.generation[g]))
        ]
        heapq.heapify(queue)
        training = self._by_work, self._by_moves, self._by_split, self._by_order
        steps = *training, self._by_draft, self._by_room, self._by_bound, self._by_reach
        told = time.monotonic()
        while queue:
            if time.monotonic() > told + QUIET_SECONDS:
                told, counts = time.monotonic(), f"{len(self._rows)} tables priced, {len(queue):,} may be faster"
                if os.environ.get("RANK", "0") == "0":
                    print(f"search of layouts: {counts}", file=sys.stderr, flush=True)
            _, step, t, g = heapq.heappop(queue)
            if step == len(steps):
                yield self._rows[t, g], len(self._rows)
            elif (floor := steps[step](t, g)) is not None:
                exact = step + 1 == len(steps)
                heapq.heappush(queue, (floor if exact else floor * (1 - ROUNDING), step + 1, t, g))

    # ---- the steps; None: refused

    def _training_floor(self, row: TrainingRow) -> float | None:
        if self._floors.rough_bytes(row)[0] > self.limit:
            self.refused["memory of training"] += len(self.space.generation)
            return None
        try:
            return self._floors.rough_seconds(row)
        except InputError as error:
            self._refuse("not measured", error, len(self.space.generation))
            return None

    def _generation_floor(self, number: int) -> float | None:
        setting, table = self.setting, self.space.table(0, number)
        try:
            costs = setting.generation_costs(table)
        except InputError as error:
            self._refuse("not measured", error, len(self.space.training))
            return None
        limits = setting.limits(table, costs)
        self._generation_bytes[number] = needs = setting.generation_bytes(table, limits)
        if needs.least > self.limit:
            self.refused["memory of generation and inference"] += len(self.space.training)
            return None
        degrees = [layout.tp for _, layout in table.inference]
        replicas = max(table.generation.tp, *degrees) // min(degrees)
        return generation_floor(setting.inputs.drawn.batches, costs, limits, table.generation.dp, replicas)

    def _by_work(self, t: int, g: int) -> float | None:
        if t not in self._works:
            try:
                self._works[t] = self._work(t)
            except InputError as error:  # it has more micro-batches than can be scheduled
                self._works[t], self._unscheduled[t] = None, error
        generation, needs = self._generation_floors[g], self._generation_bytes[g]
        assert generation is not None and needs is not None, "only rows with floors are paired"
        if t in self._unscheduled:
            self._refuse("too many micro-batches", self._unscheduled[t])
            return None
        if (training := self._works[t]) is None:
            self.refused["memory of training"] += 1
            return None
        if self._floors.rough_bytes(self.space.training[t])[1] + needs.least > self.limit:
            self.refused["memory of generation and inference"] += 1
            return None
        return training + generation + (0.0 if self._may_keep(self._held[t], needs) else self._captures[g])

    def _work(self, t: int) -> float | None:
        row = self.space.training[t]
        problems, held = self._floors.problems(row), self._floors.rough_bytes(row)[0]
        self._held[t] = held + fmean(min_memory(problems[0][1]))
        return self._floors.seconds(row, problems, work_bound) if self._held[t] <= self.limit else None

    def _may_keep(self, held: float, needs: GenerationBytes) -> bool:
        """Whether a rank that trains with so much may have room for generation beside it: for all of the cache, or for
        what memory has cut it down to, which leaves no more free than a part of it."""
        most = self.keeping_limit
        if held + needs.copy + needs.cache <= most:
            return True
        return held + needs.copy + needs.sample <= most and self.limit - needs.cut <= most

    def _by_moves(self, t: int, g: int) -> float:
        floor = self._by_work(t, g)  # of generation more may be known by now
        assert floor is not None, "nothing refuses it since"
        return floor + self._moves(t, g).before

    def _by_split(self, t: int, g: int) -> float:
        """With the least of training that a draft may choose."""
        self._works[t] = max(self._works[t] or 0.0, self._choices(t)[0][0])
        return self._by_moves(t, g)

    def _by_order(self, t: int, g: int) -> float:
        """With a bound that knows what comes before what, which takes longer."""
        self._works[t] = max(self._works[t] or 0.0, self._ordered(t))
        return self._by_moves(t, g)

    @remembered
    def _choices(self, t: int) -> list[tuple[float, int, Problems]]:
        """All that a draft may choose, the least work first, each with the seconds of its work."""
        row = self.space.training[t]
        choices = enumerate(self._floors.choices(row))
        return sorted((self._floors.seconds(row, problems, work_bound), n, problems) for n, problems in choices)

    @remembered
    def _ordered(self, t: int) -> float:
        """Least seconds of the choices by their order; those with more work are left out."""
        least = inf
        for work, _, problems in self._choices(t):
            if work < least:
                least = min(least, max(work, self._floors.seconds(self.space.training[t], problems, quick_bound)))
        return least

    def _by_draft(self, t: int, g: int) -> float | None:
        """With generation as it is priced."""
        if (t, g) not in self._drafts:
            self._drafts[t, g] = self._drafted(self.space.table(t, g), whole=True)
        draft = self._drafts[t, g]
        if draft is None:
            return None
        generation = self._simulated(g, draft, ideal_limits(draft))
        self._generation_floors[g] = generation.fused  # of all tables with these rows
        if capture := graph_capture(draft, kept=False):
            self._captures[g] = capture.seconds
        return self._with(t, g, draft, generation)

    def _drafted(self, table: Table, whole: bool = False) -> Candidate | None:
        draft = None
        try:
            draft = self.setting.draft(table, whole)
            check_headroom(draft)
        except MemoryRefusal as error:
            self._refuse(f"memory of {error.phase}", error)
            left = 0.0 if draft else self.headroom_bytes
            self._lacking.append((error.missing_bytes + left, table.text, table, error.phase, str(error)))
            return None
        except InputError as error:  # such as fusion.intra_stage=time_sharing: ..., or host memory: ...
            self._refuse(str(error).partition(":")[0].partition("=")[0], error)
            return None
        return draft

    def _refuse(self, rule: str, error: InputError, tables: int = 1) -> None:
        self.refused[rule] += tables
        self._said.setdefault(rule, str(error))

    def _by_room(self, t: int, g: int) -> float:
        draft = self._draft(t, g)
        return self._with(t, g, draft, self._generation(g, draft))

    @remembered
    def _by_bound(self, t: int, g: int) -> float | None:
        """With the backwards that the run has; where they are split memory may refuse it yet."""
        draft = self._draft(t, g)
        if self.setting.split is None:
            draft = self._drafts[t, g] = self._drafted(self.space.table(t, g))
        if draft is None:
            return None
        return with_schedules(draft, self._generation(g, draft), self._moves(t, g), bound_seconds(draft)).seconds

    def _by_reach(self, t: int, g: int) -> float:
        """With a schedule that is there, which a bound need not be."""
        if (t, g) not in self._rows:
            draft = self._draft(t, g)
            made = price(draft, self._generation(g, draft), self._moves(t, g))
            fullest = draft.memory.fullest(made.activations)
            needed, limit = draft.memory.needed(fullest), draft.memory.limit
            bound = self._by_bound(t, g)
            assert bound is not None, "it was bounded before"
            least = min(bound, made.seconds)
            self._rows[t, g] = Row(self.space.table(t, g), made, least, fullest, needed, limit)
        return self._rows[t, g].seconds * (1 - WORTH_REACHING)

    def _with(self, t: int, g: int, draft: Candidate, generation: GenerationPrice) -> float:
        """With no more than its work known of training."""
        training = self._works[t]
        assert training is not None, "its work was priced"
        moves = self._moves(t, g)._replace(beneath=0.0)  # how much of it shows depends on the room that there is
        return training + with_schedules(draft, generation, moves, 0.0).beside_training

    def _draft(self, t: int, g: int) -> Candidate:
        draft = self._drafts[t, g]
        assert draft is not None, "a table that is priced fits"
        return draft

    def _generation(self, g: int, draft: Candidate) -> GenerationPrice:
        made, ideal = self._simulated(g, draft, draft.generation.limits), ideal_limits(draft)
        return made if ideal == draft.generation.limits else made.at_least(self._simulated(g, draft, ideal))

    def _simulated(self, g: int, draft: Candidate, limits: InstanceLimits) -> GenerationPrice:
        """Costs and instances are those of the generation row."""
        if (g, limits) not in self._generated:
            self._generated[g, limits] = simulate_generation(draft, limits)
        return self._generated[g, limits]

    def _moves(self, t: int, g: int) -> Moves:
        row, decoding = self.space.training[t], self.space.generation[g]
        layouts = tuple(self._floors.cut_layouts(row).items())
        return self.setting.move_seconds(layouts, decoding.generation, decoding.inference)

    def _is_measured(self, row: TrainingRow) -> bool:
        try:
            self._floors.rough_seconds(row)
        except InputError:
            return False
        return True

    def _nothing_fits(self) -> InputError:
        """Which table lacks least, of those that were drafted and those that hold least."""
        world, share = self.setting.run.world_size, self.setting.run.config.parallel.headroom
        for t, g in islice(self._leanest(), CLOSEST * len(self.space.generation)):
            if (t, g) not in self._drafts:
                self._drafts[t, g] = self._drafted(self.space.table(t, g), whole=True)
        if not self._lacking:
            told = ", ".join(f"{count} {rule}" for rule, count in self.refused.items())
            first = next(iter(self._said.values()), "")  # whose remedies do not help where others lack other memory
            first = first.partition("; ")[0] if "memory of" in told else first
            said = f"no layouts can run on {world} ranks: {told}; the first: {first}"
            return MemoryRefusal("", 0, f"{said}; {MORE}") if "memory" in told else InputError(said)
        missing, _, table, phase, told = min(self._lacking, key=itemgetter(0, 1))
        if not auto_layouts(self.setting.run.config):  # there is one table, as far as anybody can tell
            return MemoryRefusal(phase, missing, told)
        free = f" beside parallel.headroom={share:g}" if share else ""
        return MemoryRefusal(
            phase,
            missing,
            f"memory: no layouts fit {world} ranks of {self.setting.inputs.hardware.name}: the closest, {table}, lacks "
            f"{readable_bytes(missing)} of a rank in {phase}{free}; {MORE}",
        )

    def has_room(self) -> bool:
        """Whether one of the LEANEST tables fits into memory."""
        return any(self._drafted(self.space.table(t, g)) for t, g in islice(self._leanest(), LEANEST))

    def _leanest(self) -> Iterator[tuple[int, int]]:
        """Tables, those first of which a mean rank holds least."""
        training = [t for t, row in enumerate(self.space.training) if self._is_measured(row)]
        training.sort(key=lambda t: (self._floors.rough_bytes(self.space.training[t]), t))
        generation = [g for g, needs in enumerate(self._generation_bytes) if needs]  # that were measured
        generation.sort(key=lambda g: (needs.least if (needs := self._generation_bytes[g]) else 0, g))
        return product(training, generation)


def check_headroom(draft: Candidate) -> None:
    """Raise MemoryRefusal unless every phase leaves the headroom free, with the leanest of the training schedules."""
    memory, given = draft.memory, draft.training.given
    fullest = memory.fullest(memory.most_held(*given[0].values()) if given else min_memory(draft.training.problem))
    missing = memory.needed(fullest) - memory.cap
    if missing > 0:
        message = f"{fullest.phase} leaves less than parallel.headroom={memory.headroom:g} of a rank's memory"
        raise MemoryRefusal(fullest.phase, missing, message)
