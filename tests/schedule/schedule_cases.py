"""Problems for the schedule tests, and a checker that shares no code with the package."""

import random

from rlhfuse.schedule.problem import FusionProblem, Pipeline

# (P0, P1, M0, M1, f0, f1, a0, a1), serial 1F1B, latency bound, serial memory, memory bound at the latency bound
TABLE_3 = [
    ((8, 4, 32, 16, 5, 4, 1.95, 2), 813, 708, 15.6, 13.65),
    ((8, 4, 16, 8, 5, 4, 1.95, 2), 477, 372, 15.6, 13.65),
    ((8, 4, 8, 4, 5, 4, 1.95, 2), 309, 225, 15.6, 15.6),
    ((8, 8, 32, 32, 5, 2, 1.95, 1), 819, 702, 15.6, 13.65),
    ((8, 8, 16, 16, 5, 2, 1.95, 1), 483, 366, 15.6, 13.65),
    ((8, 8, 8, 8, 5, 2, 1.95, 1), 315, 225, 15.6, 15.6),
    ((16, 8, 64, 32, 2, 2, 1.64, 2), 708, 618, 26.24, 18.04),
    ((16, 8, 32, 16, 2, 2, 1.64, 2), 420, 330, 26.24, 18.04),
    ((16, 8, 16, 8, 2, 2, 1.64, 2), 276, 186, 26.24, 26.24),
    ((16, 16, 64, 64, 2, 1, 1.64, 1), 711, 606, 26.24, 18.04),
    ((16, 16, 32, 32, 2, 1, 1.64, 1), 423, 318, 26.24, 18.04),
    ((16, 16, 16, 16, 2, 1, 1.64, 1), 279, 186, 26.24, 26.24),
]


def table_3_problem(p0, p1, m0, m1, f0, f1, a0, a1):
    critics = p0 // p1
    pipelines = [Pipeline("actor", "actor", tuple(range(p0)), m0, (f0,) * p0, (2 * f0,) * p0, (a0,) * p0)]
    for k in range(critics):
        block = tuple(reversed(range(k * p1, (k + 1) * p1)))
        name = f"critic.{k}" if critics > 1 else "critic"
        pipelines.append(Pipeline(name, "critic", block, m1, (f1,) * p1, (2 * f1,) * p1, (a1,) * p1))
    return FusionProblem(p0, tuple(pipelines))


def random_problem(seed, largest=4):
    """Any placement (a node may be visited twice), unequal times, lags, split backwards, float or integer times."""
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
        microbatches, model = rng.randint(1, 5), f"m{p % 2}"
        pipelines.append(
            Pipeline(f"{model}.{p}", model, tuple(placement), microbatches, times(), times(), times(), weight)
        )
    return FusionProblem(nodes, tuple(pipelines), transfer=rng.choice([0, 0, 1, 0.25]))


def check(problem, orders):
    """Makespan and peak memory per node of any valid orders; asserts every rule. Plain repeated relaxation."""
    pipes = {p.name: p for p in problem.pipelines}
    everything = {
        (p.name, s, kind, m)
        for p in problem.pipelines
        for s in range(len(p.placement))
        for kind in ("FBW" if p.weight_gradient else "FB")
        for m in range(p.microbatches)
    }
    listed = [(a.pipeline, a.stage, a.kind.value, a.microbatch) for order in orders for a in order]
    assert len(listed) == len(everything) and set(listed) == everything
    end = {}
    progress = True
    while progress:
        progress = False
        for node, order in enumerate(orders):
            clock = 0
            for a in order:
                pipe, key = pipes[a.pipeline], (a.pipeline, a.stage, a.kind.value, a.microbatch)
                assert pipe.placement[a.stage] == node
                ready, known = clock, True
                for source, stage in needs(pipe, a.stage, a.kind.value):
                    at = end.get((a.pipeline, stage, source, a.microbatch))
                    if at is None:
                        known = False
                        break
                    ready = max(ready, at + (problem.transfer if pipe.placement[stage] != node else 0))
                if not known:
                    break
                times = {"F": pipe.forward, "B": pipe.backward, "W": pipe.weight_gradient}[a.kind.value]
                clock = ready + times[a.stage]
                if key not in end:
                    end[key], progress = clock, True
                assert end[key] == clock
    assert len(end) == len(everything), "deadlock"
    for name, s, kind, m in everything:
        assert m == 0 or end[name, s, kind, m] > end[name, s, kind, m - 1], "micro-batches out of order"
    peaks = []
    for order in orders:
        level = peak = 0
        for a in order:
            pipe = pipes[a.pipeline]
            if a.kind.value == "F":
                level += pipe.activation[a.stage]
            elif a.kind.value == ("W" if pipe.weight_gradient else "B"):
                level -= pipe.activation[a.stage]
            peak = max(peak, level)
        peaks.append(peak)
    return max(end.values()), peaks


def needs(pipe, stage, kind):
    """(kind, stage) of everything that must precede, for the same micro-batch."""
    if kind == "F":
        return [("F", stage - 1)] if stage else []
    if kind == "W":
        return [("B", stage)]
    return [("F", stage)] + ([("B", stage + 1)] if stage + 1 < len(pipe.placement) else [])
