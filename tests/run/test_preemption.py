"""A run that is given notice in every phase, and goes on, ends like one that was left alone, and says what it needs."""

import math
import shutil
from types import SimpleNamespace

import pytest
from testkit.programs import forked
from testkit.runs_table import assert_same_bits, metrics_of
from testkit.tiny import write_run

from rlhfuse.run import run_loop
from rlhfuse.run.checkpoint.checkpoint import checkpoints_in

ITERATIONS = 5
# moment of testkit/killed_training.py, iterations saved afterwards (every second is anyway), how `preempted` begins.
# A run that evaluates first, after the iteration that it goes on from, counts that one.
NOTICES = (
    ("0 notice 1 building models", 0, "stopped by SIGUSR1 in: "),
    ("1 notice 2 start.0, .*: generation: step", 1, "stopped: 1 of 5 iterations are done, saved in "),
    ("1 stuck 1 start.0, .*: inference: ", 1, "not done in time, 1 s (trainer.grace_seconds): iteration 1 of 5 is"),
    ("1 notice 1 start.0, .*train mini-batch 1", 2, "stopped: 2 of 5 iterations are done, saved in "),
    ("0 late 1 start.1, .*: inference: ", 3, "stopped: 3 of 5 iterations are done, saved in "),
    ("1 notice 1 start.0, .*: file begins", 4, "stopped: 4 of 5 iterations are done, saved in "),
    ("0 notice 1 evaluation after iteration 4", 5, "stopped: 5 of 5 iterations are done, saved in "),
    ("1 stuck 1 exporting models", 5, "not done in time, 1 s (trainer.grace_seconds): the export"),
    ("0 notice 1 exporting models", 5, ""),
)


def test_notices_in_every_phase_cost_nothing(programs, pools, tmp_path):
    """The same run goes on after each; it evaluates after the second, fourth and last iteration."""
    held_out = tmp_path / "held_out.jsonl"
    config = write_run(
        tmp_path,
        trainer__iterations=ITERATIONS,
        trainer__save_every=2,
        trainer__eval_every=2,
        data__val_files=[str(held_out)],
    )
    shutil.copy(tmp_path / "prompts.jsonl", held_out)
    run, whole = tmp_path / "run", tmp_path / "whole"
    for number, (moment, done, told) in enumerate(NOTICES):
        grace = "trainer.grace_seconds=1" if " stuck " in moment else "trainer.grace_seconds=540"
        codes, said = forked(config, moment, tmp_path / f"{number}.log", "trainer.resume=auto", grace)
        assert codes == ([130, 130] if told else [0, 0]), said
        assert max((int(one.name.partition("-")[2]) for one in checkpoints_in(run)), default=0) == done, said
        file = run / "preempted"
        assert file.exists() == bool(told), said
        if told:
            text = file.read_text()
            assert text.startswith(told) and "; go on with: " in text.replace(
                "start the same command again", "go on with: "
            )
    codes, said = forked(config, "0 one 1 no such moment", tmp_path / "whole.log", f"trainer.output_dir={whole}")
    assert codes == [0, 0], said
    assert [row["iteration"] for row in metrics_of(run)] == list(range(ITERATIONS))
    assert len(assert_same_bits(whole, run)) == 3
    assert (run / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()


@pytest.mark.parametrize(
    "left, mean, done, stops",
    [
        (math.inf, 60.0, 1, False),
        (61.0, 60.0, 1, False),
        (59.0, 60.0, 1, True),
        (59.0, 60.0, 9, False),  # that was the last
        (1.0, 0.0, 0, False),  # of the first nothing is known
    ],
)
def test_no_iteration_begins_that_would_outlast_the_time(left, mean, done, stops):
    guard = SimpleNamespace(stop_asked=False, notice=False, seconds_left=lambda: left)
    loop = run_loop.RunLoop.__new__(run_loop.RunLoop)
    loop.watchdog, loop._mean_seconds = SimpleNamespace(guard=guard), mean
    loop.config = SimpleNamespace(trainer=SimpleNamespace(iterations=9))
    assert loop._asked_to_stop(done) == guard.notice == stops
