"""What a schedule holds with what passes: two models whose peaks do not meet, and more under way than usual."""

from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.planning.memory.memory_budget import GenerationMemory, MemoryBudget
from rlhfuse.planning.training.passing import PassingMemory
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.ir.problem import FusionProblem, Pipeline
from rlhfuse.schedule.ir.schedule import Schedule
from rlhfuse.schedule.rules.builders import serial_1f1b


def problem() -> FusionProblem:
    """Two stages each, in opposite directions: the critic's first stage is where the actor's last is, and holds two."""

    def pipeline(model: str, placement: tuple[int, ...]) -> Pipeline:
        return Pipeline(model, model, placement, 3, (1, 1), (2, 2), (100, 100))

    return FusionProblem(2, (pipeline("actor", (0, 1)), pipeline("critic", (1, 0))))


def budget(**passing: tuple[float, ...]) -> MemoryBudget:
    made = PassingMemory(passing, dict.fromkeys(passing, 7.0), dict.fromkeys(passing, (5.0, 3.0))) if passing else None
    return MemoryBudget((), hardware_by_name("h100", "cuda"), 1e9, "", 1.0, GenerationMemory(0, 0, 0, 0), passing=made)


def test_what_passes_counts_where_it_meets_what_is_held():
    schedule = serial_1f1b(problem())
    assert evaluate(schedule).node_peak_memory == (200, 200)
    # the critic's last stage on node 0 and the actor's on node 1 hold one micro-batch: much may pass beside it
    held = budget(actor=(10, 90), critic=(20, 90)).held_by(schedule)
    assert held == (200 + 10 - 90, 200 + 20 - 90)  # with the most that passes: 210 and 220
    held = budget(actor=(10, 150), critic=(20, 150)).held_by(schedule)
    assert held == (100, 100)  # with 150 beside it the one micro-batch is the peak
    assert budget().held_by(schedule) == (200, 200)  # on a CPU the sum of the most of both is planned


def test_hidden_states_of_more_micro_batches_than_usual_are_received_into_more_memory():
    orders = (
        "actor:0F0 actor:0F1 actor:0F2 actor:0B0 actor:0B1 actor:0B2 "
        "critic:1F0 critic:1B0 critic:1F1 critic:1B1 critic:1F2 critic:1B2",
        "actor:1F0 actor:1F1 actor:1F2 actor:1B0 actor:1B1 actor:1B2 "
        "critic:0F0 critic:0F1 critic:0B0 critic:0F2 critic:0B1 critic:0B2",
    )
    schedule = Schedule.parse(problem(), "\n".join(f"node {node}: {order}" for node, order in enumerate(orders)))
    # the actor's last stage has three under way where one is usual
    assert budget(actor=(0, 0), critic=(0, 0)).held_by(schedule) == (300, 300 + 2 * 7)


def test_gradients_stay_where_they_were_received_until_w():
    split = Pipeline("actor", "actor", (0, 1), 3, (1, 1), (2, 2), (100, 100), (1, 1), (60, 60))
    orders = (
        "actor:0F0 actor:0F1 actor:0B0 actor:0B1 actor:0F2 actor:0B2 actor:0W0 actor:0W1 actor:0W2",
        "actor:1F0 actor:1B0 actor:1F1 actor:1B1 actor:1F2 actor:1B2 actor:1W0 actor:1W1 actor:1W2",
    )
    text = "\n".join(f"node {node}: {order}" for node, order in enumerate(orders))
    schedule = Schedule.parse(FusionProblem(2, (split,)), text)
    first, last = budget(actor=(40, 40)).held_by(schedule)
    assert first == 2 * 60 + 100 + 2 * 7  # F of the third beside two for W; gradients of three stay, one is usual
    assert last == 2 * 60 + 100  # which receives none


def test_what_a_backward_leaves_for_w_passes_in_it_but_once():
    """Layers that run again leave more than a forward does: B's end is the peak, and 5 of the 40 are counted in it."""
    split = Pipeline("actor", "actor", (0,), 2, (1,), (2,), (100,), (1,), (160,))
    text = "node 0: actor:0F0 actor:0F1 actor:0B0 actor:0B1 actor:0W0 actor:0W1"
    schedule = Schedule.parse(FusionProblem(1, (split,)), text)
    assert budget(actor=(40,)).held_by(schedule) == (2 * 160 - 5,)
