"""Random schedules, damaged programs, and a judge of programs that shares no code with lowering or verification."""

import math
import random
from dataclasses import replace
from itertools import product

from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import StageCosts, fused_problem
from rlhfuse.schedule.ir.ranks import rank_map
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.program.program import Program

L = ParallelLayout.parse

# Layouts of the models.
GROUPS = [
    ("d1t1p2", "d1t1p2"),
    ("d1t1p4", "d2t1p2"),  # K 1:2
    ("d2t1p3", "d3t1p2"),  # coprime, K 2:3 on six ranks
    ("d1t2p2", "d1t1p4"),  # critic merged by 2
    ("d1t1p4", "d1t2p2"),  # actor merged by 2
    ("d1t4p2", "d2t1p4"),  # merged by 4, the critic's pipeline on one node
    ("d2t2p2", "d2t1p4"),  # two replicas, merged
    ("d2t1p1", "d1t1p2"),  # no pipeline beside one
    ("d2t2p1", "d2t2p1"),  # tensor and data parallel only
    ("d1t1p2v2", "d1t1p2v3"),  # interleaved
    ("d2t1p2v2", "d1t1p4v2"),
    ("d1t1p4v2", "d1t2p2v2"),  # interleaved and merged
    ("d1t1p3", "d1t1p3", "d1t1p3"),  # three models
    ("d1t1p4", "d2t1p2", "d4t1p1"),
    ("d1t1p4", "d1t2p2", "d2t1p2v2"),
    ("d1t1p3",),
]
MODELS = ("actor", "critic", "other")
TRANSFERS = ("SF", "SB", "RF", "RB")


def fused(layouts, microbatches, forward, activation=1, alternate=True):
    """(problem, ranks) of layouts as text: a stage of the n-th model takes forward[n], and twice that backward."""
    layouts = dict(zip(MODELS, map(L, layouts)))

    def row(layout, value):
        return (value,) * layout.stages

    costs = {
        model: StageCosts(row(layout, time), row(layout, 2 * time), row(layout, activation))
        for (model, layout), time in zip(layouts.items(), forward)
    }
    return fused_problem(layouts, microbatches, costs, alternate=alternate), rank_map(layouts, alternate)


def random_case(seed, groups=GROUPS, most=3):
    """(schedule, ranks, tied) with random costs and a random order of all that may run next."""
    rng = random.Random(seed)
    layouts = dict(zip(MODELS, map(L, groups[seed % len(groups)])))
    k1, *others = (share.pipelines for share in rank_map(layouts).shape.shares)
    multiple = math.lcm(k1, *others) // k1  # K1*M1 = Kn*Mn

    def times(layout):
        return tuple(rng.choice((rng.randint(1, 9), rng.uniform(0.1, 5))) for _ in range(layout.stages))

    costs = {
        model: StageCosts(times(layout), times(layout), times(layout), times(layout) if rng.random() < 0.3 else None)
        for model, layout in layouts.items()
    }
    alternate = rng.random() < 0.8
    problem = fused_problem(layouts, multiple * rng.randint(1, most), costs, alternate=alternate)
    problem = replace(problem, transfer=rng.choice((0, 0, 1.5)))
    tied = frozenset(model for model in layouts if rng.random() < 0.4)
    return random_schedule(problem, rng), rank_map(layouts, alternate), tied


def random_schedule(problem, rng):
    """A random topological order of the problem's actions, cut by node."""
    graph = build_graph(problem)
    done, finished, orders = [0] * len(graph.lanes), set(), [[] for _ in range(problem.nodes)]
    weight = [rng.random() ** 2 for _ in graph.lanes]  # some lanes are eager, others late
    while len(finished) < graph.size:
        ready = [
            (number, lane.first + done[number])
            for number, lane in enumerate(graph.lanes)
            if done[number] < lane.microbatches
            and (graph.upstream[lane.first + done[number]] < 0 or graph.upstream[lane.first + done[number]] in finished)
        ]
        number, operation = rng.choices(ready, [weight[number] for number, _ in ready])[0]
        done[number] += 1
        finished.add(operation)
        orders[graph.lanes[number].node].append(graph.actions[operation])
    return Schedule(problem, tuple(map(tuple, orders)))


# ---- damage


def edited(programs, rank, low, high, new):
    """The programs, with `new` in place of the instructions low:high of a rank."""
    old = programs[rank].instructions
    return replace(programs, by_rank={**programs.by_rank, rank: Program(rank, (*old[:low], *new, *old[high:]))})


def places(programs):
    """(rank, place, instruction) of all instructions."""
    for rank, program in programs.items():
        for i, instruction in enumerate(program.instructions):
            yield rank, i, instruction


def dropped(programs):
    """Every instruction left out once."""
    for rank, i, one in places(programs):
        yield f"{rank}.{i} {one} dropped", edited(programs, rank, i, i + 1, [])


def doubled(programs):
    for rank, i, one in places(programs):
        yield f"{rank}.{i} {one} doubled", edited(programs, rank, i, i + 1, [one, one])


def readdressed(programs):
    """Every transfer sent to, or received from, each other rank, and to none."""
    for rank, i, one in places(programs):
        for peer in [None, *(set(programs) - {one.peer})] if one.peer is not None else []:
            yield f"{rank}.{i} {one} to {peer}", edited(programs, rank, i, i + 1, [replace(one, peer=peer)])


def renumbered(programs):
    """Every transfer of another micro-batch; every reduction and step of another stage."""
    for rank, i, one in places(programs):
        key = "stage" if one.action.microbatch is None else "microbatch"
        other = one.action._replace(**{key: getattr(one.action, key) + 1})
        yield f"{rank}.{i} {one} as {other}", edited(programs, rank, i, i + 1, [replace(one, action=other)])


def exchanged(programs, rank, i, j):
    seq = programs[rank].instructions
    new = seq[j], *seq[i + 1 : j], seq[i]
    return f"{rank}.{i} {seq[i]} swapped with {seq[j]}", edited(programs, rank, i, j + 1, new)


def swapped(programs, distance=1):
    """Every two instructions of a rank that stand `distance` apart, exchanged."""
    for rank, i, _ in places(programs):
        if i + distance < len(programs[rank].instructions):
            yield exchanged(programs, rank, i, i + distance)


def swapped_on_channel(programs):
    """At one end of a channel, two transfers exchanged that follow each other there."""
    before = {}
    for rank, i, one in places(programs):
        if one.peer is not None:
            channel = rank, one.peer, str(one.action.kind)[0]
            if channel in before:
                yield exchanged(programs, rank, before[channel], i)
            before[channel] = i


def early_reductions(programs):
    """Every reduction moved before the last backward (or weight gradient) of its stage."""
    for rank, i, one in places(programs):
        if str(one.action.kind) == "RG":
            seq = programs[rank].instructions
            ends = [j for j, other in enumerate(seq) if str(other.action.kind) in "BW"]
            last = max(j for j in ends if seq[j].action[:2] == one.action[:2])
            yield f"{rank}.{i} {one} before {seq[last]}", edited(programs, rank, last, i + 1, [one, *seq[last:i]])


def opposite_steps(programs):
    """The optimizer steps of two models in the other order on one rank."""
    for rank, program in programs.items():
        seq = program.instructions
        steps = [i for i, one in enumerate(seq) if str(one.action.kind) == "ST"]
        for a, b in zip(steps, steps[1:]):
            new = *seq[a + 1 : b + 1], seq[a]
            yield f"{rank}: {seq[b]} before {seq[a]}", edited(programs, rank, a, b + 1, new)


# ---- the judge: walks through every interleaving of tiny programs


class Judge:
    """Explores all states of programs. `layouts` and `ranks` say who holds what; nothing else is trusted."""

    def __init__(self, programs, ranks, problem, tied):
        self.ranks, self.tied = ranks, tied
        self.order = sorted(programs)
        self.seq = {r: programs[r].instructions for r in self.order}
        self.microbatches = {p.name: p.microbatches for p in problem.pipelines}
        self.model = {p.name: p.model for p in problem.pipelines}
        self.split = {p.name: p.split for p in problem.pipelines}

    def stages(self, rank, name):
        return self.ranks.stages(self.ranks.replica_of(rank), name)

    def sound(self):
        """What every rank does, walked through by itself: right values in, all of the work done once, in order."""
        wanted = {r: set() for r in self.order}
        for replica, pipelines in enumerate(self.ranks.replicas):
            for name in pipelines:
                stages = self.ranks.stages(replica, name)
                kinds = ("F", "B", "W") if self.split[name] else ("F", "B")
                for s, cell in enumerate(stages):
                    wanted_here = {(name, s, k, m) for k in kinds for m in range(self.microbatches[name])}
                    wanted_here |= {(name, s, "RG", None)}
                    if self.model[name] in self.tied and s in (0, len(stages) - 1) and stages[0] != stages[-1]:
                        wanted_here |= {(name, s, "TE", None)}
                    for rank in cell:
                        wanted[rank] |= wanted_here
                        if s == min(i for i, c in enumerate(stages) if rank in c):
                            wanted[rank] |= {(name, s, "ST", None)}
        return all(self._sound(rank, wanted[rank]) for rank in self.order)

    def _sound(self, rank, wanted):
        have, done, latest = set(), set(), {}
        for instruction in self.seq[rank]:
            name, s, kind, m = instruction.action
            kind = str(kind)
            if name not in self.microbatches:
                return False
            stages = self.stages(rank, name)
            key = (name, s, kind, m)
            if key in done:
                return False
            if kind in ("F", "B", "W"):
                if latest.get(key[:3], -1) != m - 1:  # micro-batches in order: the bits of the gradient
                    return False
                latest[key[:3]] = m
            last = {(name, s, "W" if self.split[name] else "B", mb) for mb in range(self.microbatches[name])}
            summed = {(name, s, "TE", None)} & wanted
            needs = {
                "F": {(name, s - 1, "F", m)} if s else set(),
                "B": {(name, s, "F", m)} | ({(name, s + 1, "B", m)} if s + 1 < len(stages) else set()),
                "W": {(name, s, "B", m)},
                "SF": {(name, s, "F", m)},
                "SB": {(name, s, "B", m)},
                "TE": last,
                "RG": last | summed,
                "ST": {key for key in wanted if key[0] == name and key[2] == "RG"},
            }.get(kind, set())
            if not needs <= have:
                return False
            if kind in ("RF", "RB"):
                have.add((name, s - 1, "F", m) if kind == "RF" else (name, s + 1, "B", m))
            have.add(key)
            done.add(key)
        return {key for key in done if key[2] not in TRANSFERS} == wanted

    def channel(self, rank, i):
        """(sender, receiver, what) of a transfer."""
        instruction = self.seq[rank][i]
        name, s, kind, m = instruction.action
        kind = str(kind)
        sends = kind[0] == "S"
        stage = s if sends else s - 1 if kind == "RF" else s + 1
        ends = (rank, instruction.peer) if sends else (instruction.peer, rank)
        return *ends, (name, stage, kind[1], m)

    def issued(self, rank, upto, sender, receiver):
        """Contents of the transfers of a channel that `rank` has issued."""
        out = []
        for i in range(upto):
            kind = str(self.seq[rank][i].action.kind)
            if kind in TRANSFERS:
                a, b, what = self.channel(rank, i)
                if (a, b) == (sender, receiver) and (kind[0] == "S") == (rank == sender):
                    out.append(what)
        return out

    def members(self, rank, action):
        """Ranks of the data-parallel reduction of an RG."""
        return next(group for group in self.groups(action) if rank in group)

    def groups(self, action):
        return [group for place in self.ranks.dp_groups(self.model[action.pipeline]) for group in place]

    def cell(self, rank, action):
        return self.stages(rank, action.pipeline)[action.stage]

    def moves(self, state, one_queue):
        """Sets of ranks that can go on together; None when something goes wrong in `state`."""
        at = dict(zip(self.order, state))
        moves = []
        for rank in self.order:
            if at[rank] == len(self.seq[rank]):
                continue
            instruction = self.seq[rank][at[rank]]
            action, kind = instruction.action, str(instruction.action.kind)
            if kind in TRANSFERS:
                if not one_queue:
                    moves.append((rank,))
                elif instruction.peer in at and at[instruction.peer] < len(self.seq[instruction.peer]):
                    there = self.seq[instruction.peer][at[instruction.peer]]
                    if there.peer == rank and self.channel(rank, at[rank]) == self.channel(
                        instruction.peer, at[instruction.peer]
                    ):
                        moves.append((rank, instruction.peer))
                continue
            t, stages = self.cell(rank, action).index(rank), self.stages(rank, action.pipeline)
            events = {"ST": tuple(self.order), "TE": tuple({stages[end][t] for end in (0, -1)})}
            joint = events.get(kind, self.cell(rank, action))
            if kind == "RG" and one_queue:
                joint = tuple({r for one in joint for r in self.members(one, action)})
            if not one_queue and kind in ("F", "B") and not self._arrived(rank, action, kind, at):
                continue
            if kind == "ST" and not one_queue and not self._reduced(action, at):
                continue
            if all(self._same(one, at, action, kind) for one in joint):
                moves.append(joint)
        return moves

    def _same(self, rank, at, action, kind):
        """Whether `rank` stands in the same collective."""
        if at[rank] == len(self.seq[rank]):
            return False
        there = self.seq[rank][at[rank]].action
        same_model = self.model[there.pipeline] == self.model[action.pipeline]
        if str(there.kind) != kind or there.microbatch != action.microbatch or not same_model:
            return False
        return kind in ("ST", "TE") or there.stage == action.stage

    def _arrived(self, rank, action, kind, at):
        stages = self.stages(rank, action.pipeline)
        source = action.stage - 1 if kind == "F" else action.stage + 1
        if not 0 <= source < len(stages):
            return True
        t = self.cell(rank, action).index(rank)
        sender = stages[source][t]
        if sender == rank:
            return True
        sent = self.issued(sender, at[sender], sender, rank)
        received = self.issued(rank, at[rank], sender, rank)
        what = (action.pipeline, source, kind, action.microbatch)
        return what in [a for a, b in zip(sent, received) if a == b]

    def _reduced(self, action, at):
        """All members of all reductions of the model have issued the same stages."""

        def stages(rank):
            issued = [one.action for one in self.seq[rank][: at[rank]] if str(one.action.kind) == "RG"]
            return [one.stage for one in issued if self.model[one.pipeline] == self.model[action.pipeline]]

        return all(stages(rank) == stages(group[0]) for group in self.groups(action) for rank in group)

    def crossed(self):
        """Whether both ends of some channel disagree on the order of their transfers."""
        whole = {rank: len(seq) for rank, seq in self.seq.items()}
        pairs = product(self.order, repeat=2)
        return any(self.issued(a, whole[a], a, b) != self.issued(b, whole[b], a, b) for a, b in pairs)

    def finishes(self, one_queue):
        """Whether every interleaving comes to the end."""
        start = tuple(0 for _ in self.order)
        end = tuple(len(self.seq[r]) for r in self.order)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            moves = self.moves(state, one_queue)
            if not moves and state != end:
                return False
            for move in moves:
                following = tuple(p + (r in move) for r, p in zip(self.order, state))
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return True

    def harmless(self):
        """In the model of one queue per communicator: right values, right order, and no interleaving hangs."""
        return self.sound() and not self.crossed() and self.finishes(one_queue=False)
