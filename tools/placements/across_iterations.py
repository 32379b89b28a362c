"""The critic across iterations: its training runs beside the next generation, on ranks of its own (REAL, Figure 13).

    actor's ranks     generation | reference |  actor trains | generation | reference | ...
    critic's ranks               | reward, critic |  critic trains        | reward, critic | ...

Synchronous PPO as ever: the next scores of the critic wait for its training.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from placements.mesh import Mesh
from placements.problem import Call, Choice, MeshPlan, MeshProblem

ACTOR_LANE = ("generation", "reference_inference", "actor_train")
CRITIC_LANE = ("reward_inference", "critic_inference", "critic_train")


def period_seconds(problem: MeshProblem, plan: MeshPlan) -> float:
    """Seconds of an iteration once all repeats: the longer of what must happen one after the other for the actor, its
    scores by both lanes included, and of the critic's own work."""
    took = {name: problem.call_seconds(problem.calls[name], plan) for name in plan}
    critic_scores = sum(took.get(name, 0.0) for name in CRITIC_LANE[:2])
    scores = max(took.get("reference_inference", 0.0), critic_scores)
    return max(took["generation"] + scores + took["actor_train"], critic_scores + took["critic_train"])


def best_lanes(problem: MeshProblem, actor: Mesh, critic: Mesh) -> tuple[float, MeshPlan] | None:
    """The shortest period with the actor's calls on one mesh and the critic's on another; None where nothing fits."""
    lanes = [_fitting(problem, ACTOR_LANE, actor), _fitting(problem, CRITIC_LANE, critic)]
    best = None
    for actors, critics in product(*lanes):
        plan = {**actors, **critics}
        seconds = period_seconds(problem, plan)
        if best is None or seconds < best[0]:
            best = seconds, plan
    return best


def _fitting(problem: MeshProblem, names: Sequence[str], mesh: Mesh) -> list[MeshPlan]:
    """Plans of a lane: for each option of its training the fastest others in the room that it leaves."""
    training, fitting = problem.calls[names[-1]], []
    room = min(problem.memory_bytes[mesh.first : mesh.last + 1])
    others = [problem.calls[name] for name in names[:-1] if name in problem.calls]
    for option in training.options.get(mesh, ()):
        plan = {training.name: Choice(mesh, option)}
        for call in others:
            chosen = _fastest(problem, call, mesh, plan, room - option.held_bytes)
            if chosen:
                plan[call.name] = chosen
        if len(plan) == len(others) + 1 and problem.fits(plan):
            fitting.append(plan)
    return fitting


def _fastest(problem: MeshProblem, call: Call, mesh: Mesh, plan: MeshPlan, room: float) -> Choice | None:
    fitting = [choice for choice in call.choices(mesh) if choice.option.passing_bytes <= room]
    return min(fitting, key=lambda choice: problem.call_seconds(call, {**plan, call.name: choice}), default=None)
