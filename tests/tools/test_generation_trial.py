"""A trial with tools in this process: samples go on behind what is observed, and it says how long they paused."""

from generation_trial import run_trial

from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.load import load_config
from rlhfuse.fusion.inter.tools import Answer
from rlhfuse.simulator.lengths import Turn

ENDS = tuple(range(0, 512, 4))  # tokens that end a turn
SEEN = (5, 6, 7)


class TwoCalls:
    """Each takes so long that nobody waits for it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def asks(self, turn, number) -> bool:
        return number < 2

    def submit(self, sample_id, number, turn, room) -> None:
        self.asked.append(sample_id)

    def answers(self) -> list[Answer]:
        return [Answer(sample, SEEN, seconds=0.25) for sample in self.asked]

    def delivered(self, sample_ids) -> None:
        self.asked = [sample for sample in self.asked if sample not in sample_ids]

    def waiting(self) -> str:
        return ""


def test_a_trial_with_tools():
    told: list[str] = []
    config = resolve_device(load_config("examples/quickstart.yaml", [f"rollout.stop_token_ids={list(ENDS)}"]))
    trial = run_trial(config, 6, told.append, TwoCalls())
    assert told[-1] == "6 of 6 samples finished"
    for output, own in zip(trial.lengths.output, trial.lengths.turns):
        assert len(own) == 3 and all(turn[1:] == (0.25, len(SEEN)) for turn in own[:-1])
        assert output == sum(turn.drawn for turn in own) + 2 * len(SEEN)
    prefills = [step for step in trial.steps if step.prefill_tokens]
    assert 1 < len(prefills) < len(trial.steps)
    plain = run_trial(config, 6, told.append)
    assert plain.lengths.turns == () and plain.lengths.output == tuple(own[0].drawn for own in trial.lengths.turns)
    assert trial.lengths.turns[0][-1] == Turn(trial.lengths.turns[0][-1].drawn, 0.0, 0)
