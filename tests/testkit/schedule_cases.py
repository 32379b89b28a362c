"""Problems for the schedule tests, and a checker that shares no code with the package."""

import math
import random
from dataclasses import replace

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.graph import build_graph
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline, StageCosts, fused_problem
from rlhfuse.schedule.rules.builders import greedy, lane_ranks, list_schedule, min_memory

# (P0, P1, M0, M1, f0, f1, a0, a1), serial 1F1B, latency bound, serial memory, what is proved at the latency bound
TABLE_3 = [
    ((8, 4, 32, 16, 5, 4, 1.95, 2), 813, 708, 15.6, 13.65),
    ((8, 4, 16, 8, 5, 4, 1.95, 2), 477, 372, 15.6, 15.6),
    ((8, 4, 8, 4, 5, 4, 1.95, 2), 309, 225, 15.6, 15.6),
    ((8, 8, 32, 32, 5, 2, 1.95, 1), 819, 702, 15.6, 13.65),
    ((8, 8, 16, 16, 5, 2, 1.95, 1), 483, 366, 15.6, 15.6),
    ((8, 8, 8, 8, 5, 2, 1.95, 1), 315, 225, 15.6, 15.6),
    ((16, 8, 64, 32, 2, 2, 1.64, 2), 708, 618, 26.24, 19.68),
    ((16, 8, 32, 16, 2, 2, 1.64, 2), 420, 330, 26.24, 19.68),
    ((16, 8, 16, 8, 2, 2, 1.64, 2), 276, 186, 26.24, 26.24),
    ((16, 16, 64, 64, 2, 1, 1.64, 1), 711, 606, 26.24, 19.68),
    ((16, 16, 32, 32, 2, 1, 1.64, 1), 423, 318, 26.24, 21.32),
    ((16, 16, 16, 16, 2, 1, 1.64, 1), 279, 186, 26.24, 26.24),
]
FACTS = ("forward", "backward", "activation", "weight_gradient", "weight_activation")


def table_3_problem(p0, p1, m0, m1, f0, f1, a0, a1):
    critics = p0 // p1
    pipelines = [Pipeline("actor", "actor", tuple(range(p0)), m0, (f0,) * p0, (2 * f0,) * p0, (a0,) * p0)]
    for k in range(critics):
        block = tuple(reversed(range(k * p1, (k + 1) * p1)))
        name = f"critic.{k}" if critics > 1 else "critic"
        pipelines.append(Pipeline(name, "critic", block, m1, (f1,) * p1, (2 * f1,) * p1, (a1,) * p1))
    return FusionProblem(p0, tuple(pipelines))


def table_3(number, **more):
    """The problem of a row of TABLE_3, with a cap for instance."""
    return replace(table_3_problem(*TABLE_3[number][0]), **more)


def changed_facts(pipeline, change, facts=FACTS):
    """What `change` makes of every per-stage fact that the pipeline has."""
    given = {key: getattr(pipeline, key) for key in facts}
    return {key: None if values is None else tuple(change(values)) for key, values in given.items()}


def with_facts(problem, change, facts=FACTS):
    """The problem with every per-stage fact changed."""
    pipelines = (replace(pipeline, **changed_facts(pipeline, change, facts)) for pipeline in problem.pipelines)
    return replace(problem, pipelines=tuple(pipelines))


def capped_halfway(problem):
    """Caps between what one micro-batch at a time needs and what greedy takes, node by node."""
    taken = evaluate(greedy(problem)).node_peak_memory
    return replace(problem, memory_cap=tuple((a + b) / 2 for a, b in zip(min_memory(problem), taken)))


def capped_greedy(problem, extra=0, forward_first=True, model_first=True):
    """Greedy under 1F1B's caps plus `extra` micro-batches (one number, or one per model) on every stage."""
    more = extra if isinstance(extra, dict) else dict.fromkeys(problem.models, extra)
    caps = {
        (p, s): max(1, pipeline.stages - s + more[pipeline.model])
        for p, pipeline in enumerate(problem.pipelines)
        for s in range(pipeline.stages)
    }
    graph = build_graph(problem)
    return list_schedule(graph, caps, lane_ranks(graph, forward_first, model_first))


def random_problem(seed, largest=4, models=2):
    """Up to `largest` nodes and stages, three pipelines; any placement (a node may be visited twice), unequal times.

    Lags, split backwards (half of them hold less, or more, for W), float or integer times.
    """
    rng = random.Random(seed)
    nodes = rng.randint(1, largest)
    whole = rng.random() < 0.5
    pipelines = []
    for p in range(rng.randint(1, 3)):
        stages = rng.randint(1, largest)
        if rng.random() < 0.7 and stages <= nodes:
            placement = rng.sample(range(nodes), stages)
        else:
            placement = [rng.randrange(nodes) for _ in range(stages)]

        def times():
            return tuple(rng.randint(1, 6) if whole else rng.uniform(0.1, 3) for _ in range(stages))

        weight = times() if rng.random() < 0.3 else None
        microbatches, model = rng.randint(1, 5), f"m{p % models}"
        pipelines.append(
            Pipeline(f"{model}.{p}", model, tuple(placement), microbatches, times(), times(), times(), weight)
        )
        if weight and p % 2 == seed % 2:
            pipelines[p] = replace(pipelines[p], weight_activation=times())
    return FusionProblem(nodes, tuple(pipelines), transfer=rng.choice([0, 0, 1, 0.25]))


def random_instance(seed):
    """(family, problem): small with any placement, large with any placement, fused groups, equal layouts."""
    rng = random.Random(-1 - seed)
    family = ("small", "small", "group", "small", "layout", "small", "group", "small", "small", "large")[seed % 10]
    if family == "small":
        return family, random_problem(seed, 4, models=rng.randint(1, 3))
    if family == "large":
        return family, random_problem(seed, rng.randint(5, 16), models=rng.randint(2, 3))
    return family, random_group(rng) if family == "group" else random_layout(rng)


def random_group(rng):
    """Two models as in a fused pair, K1:K2 coprime, sometimes a third one; mostly the second's are reversed."""
    depths = rng.choice([(4, 2), (4, 3), (2, 3), (6, 4), (6, 4), (9, 3), (10, 5), (15, 5), (16, 8), (16, 16), (12, 4)])
    nodes = math.lcm(*depths)
    if rng.random() < 0.3:
        depths += (rng.choice([d for d in range(1, nodes + 1) if nodes % d == 0 and 2 * d >= nodes]),)
    layouts = {f"m{number}": ParallelLayout(nodes // depth, 1, depth) for number, depth in enumerate(depths)}
    copies = [layout.dp for layout in layouts.values()]
    microbatches = math.lcm(*copies) * (rng.randint(1, 2) if nodes < 9 else 1) // copies[0]
    costs = {model: StageCosts(*_facts(rng, layout.pp)) for model, layout in layouts.items()}
    problem = fused_problem(layouts, microbatches, costs, alternate=rng.random() < 0.75)
    return replace(problem, transfer=rng.choice([0, 0, 1, 0.25]))


def random_layout(rng):
    """Up to three models of one even depth over the same nodes, micro-batches a multiple of the depth."""
    depth = rng.choice([2, 2, 2, 4, 4, 6, 8, 10])
    nodes = tuple(rng.sample(range(depth), depth))
    pipelines = []
    for number in range(rng.randint(1, 3)):
        microbatches, facts = depth * rng.randint(1, 2 if depth < 6 else 1), _facts(rng, depth)
        pipelines.append(Pipeline(f"m{number}", f"m{number}", nodes[:: rng.choice([1, -1])], microbatches, *facts))
    return FusionProblem(depth, tuple(pipelines), transfer=rng.choice([0, 0, 1, 0.25]))


def _facts(rng, stages):
    """Times, activations and sometimes weight gradients, a value per stage: whole numbers or not, alike or not."""
    whole, alike = rng.random() < 0.5, rng.random() < 0.3

    def draw():
        values = tuple(rng.randint(1, 6) if whole else rng.uniform(0.1, 3) for _ in range(stages))
        return values[:1] * stages if alike else values

    return draw(), draw(), draw(), draw() if rng.random() < 0.2 else None


# ---- the checker: from here on nothing of the package is used -------------------------------------------------


def check(problem, orders):
    """Makespan and peak memory per node of valid orders of Actions; AssertionError with the broken rule otherwise."""
    found = verdict(plain(problem), orders)
    assert not isinstance(found, str), found
    return found


def plain(problem):
    """The JSON form of a problem without caps, by itself."""
    keys = ("name", "model", "placement", "microbatches", *FACTS)
    pipelines = [{key: getattr(pipeline, key) for key in keys} for pipeline in problem.pipelines]
    return {"nodes": problem.nodes, "transfer": problem.transfer, "pipelines": pipelines}


def verdict(problem, rows, claims=None):
    """The first rule that a schedule breaks, as text, or (makespan, peak memory per node).

    problem: as in problem.json. rows: per node, tasks as in schedule.json (start and end may be left out) or
    Actions. claims: an object with makespan, peak_memory, node_peak_memory,
    lower_bound and optimal, of which any may be missing.
    """
    if len(rows) != problem["nodes"]:
        return f"{len(rows)} rows for {problem['nodes']} nodes"
    pipes = {pipe["name"]: pipe for pipe in problem["pipelines"]}
    keys = [[_key(task) for task in row] for row in rows]
    broken = _misplaced(pipes, keys) or _out_of_order(keys)
    if broken:
        return broken
    starts, ends = _earliest(problem, pipes, keys)
    if len(ends) < sum(map(len, keys)):
        return f"deadlock: {next(key for row in keys for key in row if key not in ends)} never starts"
    slack = 1e-9 * max(ends.values())
    makespan, given = max(ends.values()), [task for row in rows for task in row if isinstance(task, dict)]
    if any("start" in task or "end" in task for task in given):
        broken = _untimely(problem, pipes, rows, slack)
        if broken:
            return broken
        makespan = max(task["end"] for task in given)
    peaks = [_peak(pipes, row) for row in keys]
    return _over_cap(problem, peaks) or _untrue(claims or {}, makespan, peaks, slack) or (makespan, peaks)


def _key(task):
    return (task["pipeline"], task["stage"], task["kind"], task["microbatch"]) if isinstance(task, dict) else task


def _at(facts, key, place):
    """A value of one stage of a pipeline, or of one node of a problem; a scalar stands for all."""
    value = facts[key]
    return value[place] if isinstance(value, (list, tuple)) else value


def _duration(pipe, stage, kind):
    return _at(pipe, {"F": "forward", "B": "backward", "W": "weight_gradient"}[kind], stage)


def _kinds(pipe):
    return "FBW" if pipe.get("weight_gradient") else "FB"


def _misplaced(pipes, keys):
    """Unknown, misplaced, repeated and missing tasks."""
    places = [(pipe, stage, node) for pipe in pipes.values() for stage, node in enumerate(pipe["placement"])]
    tasks = [(pipe, stage, kind, node) for pipe, stage, node in places for kind in _kinds(pipe)]
    homes = {(p["name"], stage, kind, m): node for p, stage, kind, node in tasks for m in range(p["microbatches"])}
    seen = set()
    for node, row in enumerate(keys):
        for key in row:
            if key not in homes:
                return f"unknown task {key}"
            if homes[key] != node:
                return f"wrong node: {key} is on {node}"
            if key in seen:
                return f"repeated: {key}"
            seen.add(key)
    return next((f"missing: {key}" for key in homes if key not in seen), None)


def _out_of_order(keys):
    for row in keys:
        last = {}
        for name, stage, kind, m in row:
            if last.get((name, stage, kind), -1) > m:
                return f"micro-batches out of order: {(name, stage, kind, m)}"
            last[name, stage, kind] = m
    return None


def _sources(pipe, key):
    """Every task that must end before `key` starts, apart from the one before it on its node."""
    name, stage, kind, m = key
    if kind == "W":
        return [(name, stage, "B", m)]
    if kind == "F":
        return [(name, stage - 1, "F", m)] if stage else []
    next_stage = [(name, stage + 1, "B", m)] if stage + 1 < len(pipe["placement"]) else []
    return [(name, stage, "F", m)] + next_stage


def _lag(problem, pipe, source, key):
    return problem.get("transfer", 0) if pipe["placement"][source[1]] != pipe["placement"][key[1]] else 0


def _earliest(problem, pipes, keys):
    """Start and end of every task that can start at all: tasks are taken when all before them are done."""
    waits, feeds, ready = {}, {}, []
    for row in keys:
        for before, key in zip([None] + row, row):
            sources = _sources(pipes[key[0]], key)
            waits[key] = len(sources) + (before is not None)
            for source in sources + [before] * (before is not None):
                feeds.setdefault(source, []).append((key, source is before))
            if not waits[key]:
                ready.append(key)
    starts, ends = dict.fromkeys(ready, 0), {}
    while ready:
        done = ready.pop()
        pipe = pipes[done[0]]
        ends[done] = starts[done] + _duration(pipe, done[1], done[2])
        for key, neighbour in feeds.get(done, ()):
            arrival = ends[done] + (0 if neighbour else _lag(problem, pipe, done, key))
            starts[key] = max(starts.get(key, 0), arrival)
            waits[key] -= 1
            if not waits[key]:
                ready.append(key)
    return starts, ends


def _untimely(problem, pipes, rows, slack):
    """The times that the tasks themselves give: durations, no overlap on a node, inputs there."""
    ends = {_key(task): task["end"] for row in rows for task in row}
    for row in rows:
        clock = 0
        for task in row:
            key, pipe = _key(task), pipes[task["pipeline"]]
            if not abs(task["end"] - task["start"] - _duration(pipe, key[1], key[2])) <= slack:
                return f"{key} takes from {task['start']} to {task['end']}"
            if not task["start"] >= clock - slack:
                return f"overlap: {key} starts at {task['start']}, the task before ends at {clock}"
            clock = task["end"]
            for source in _sources(pipe, key):
                if not task["start"] >= ends[source] + _lag(problem, pipe, source, key) - slack:
                    return f"{key} starts at {task['start']}, too early after {source}"
    return None


def _peak(pipes, row):
    level = peak = 0
    for name, stage, kind, _ in row:
        activation = _at(pipes[name], "activation", stage)
        held_for_weights = "activation" if pipes[name].get("weight_activation") is None else "weight_activation"
        later = _at(pipes[name], held_for_weights, stage) if "W" in _kinds(pipes[name]) else 0
        during = level + {"F": activation, "B": max(0, later - activation), "W": 0}[kind]
        level += {"F": activation, "B": later - activation, "W": -later}[kind]
        peak = max(peak, during, level)
    return peak


def _over_cap(problem, peaks):
    given = {"memory_cap": None, "static_memory": 0, **problem}
    for node, peak in enumerate(peaks):
        cap, static = _at(given, "memory_cap", node), _at(given, "static_memory", node)
        if cap is not None and static + peak > cap + 1e-9 * max(1, cap):
            return f"over the cap: node {node} holds {static} + {peak} > {cap}"
    return None


def _untrue(claims, makespan, peaks, slack):
    if not abs(claims.get("makespan", makespan) - makespan) <= slack:
        return f"claimed makespan {claims['makespan']} is {makespan}"
    if not abs(claims.get("peak_memory", max(peaks)) - max(peaks)) <= 1e-9 * max(peaks):
        return f"claimed peak_memory {claims['peak_memory']} is {max(peaks)}"
    claimed = claims.get("node_peak_memory", peaks)
    if len(claimed) != len(peaks) or not all(abs(a - b) <= 1e-9 * max(peaks) for a, b in zip(claimed, peaks)):
        return f"claimed node_peak_memory {claimed} is {peaks}"
    if claims.get("lower_bound", 0) > makespan + slack:
        return f"claimed lower_bound {claims['lower_bound']} is above the makespan {makespan}"
    if {"optimal", "lower_bound"} <= claims.keys():
        if claims["optimal"] is not (makespan <= claims["lower_bound"] + slack):
            return f"claimed optimal {claims['optimal']}: makespan {makespan}, bound {claims['lower_bound']}"
    return None


def same_layout_problem(problem: FusionProblem) -> FusionProblem:
    """`problem` with every model's pipelines placed as the first model's. Raises InputError where they are others."""
    by_model = [[p for p in problem.pipelines if p.model == model] for model in problem.models]
    if len({tuple(p.stages for p in mine) for mine in by_model}) > 1:
        raise InputError("models have pipelines of different stages")
    placed = {p.name: replace(p, placement=first.placement) for mine in by_model for p, first in zip(mine, by_model[0])}
    return replace(problem, pipelines=tuple(placed[p.name] for p in problem.pipelines))
