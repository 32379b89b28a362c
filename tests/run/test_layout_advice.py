"""What a run is told of its layouts, without a run; a fault of that is one line."""

from types import SimpleNamespace

import torch
from testkit.four_ranks import drafted, run
from testkit.sim_helpers import long_tail

from rlhfuse.fusion.inter.report import OBSERVED, GenInferReport
from rlhfuse.run.layout_advice import layout_advice


def test_an_iteration_is_held_against_other_layouts_and_a_fault_is_a_warning():
    """Five seconds a call of the reward function are in both."""
    draft, lengths = drafted(run(reward__function="a.py:reward")), long_tail(64, longest=256)
    rows = dict.fromkeys(OBSERVED, []) | {"step": [[4, 400, 0, 1e-3, 0, 0], [2, 64, 64, 0.01, 0, 0]]}
    rows |= {"score": [[100, 2, 0.01]], "reward": [[3, 2, 15.0], [1, 2, 5.0]]}
    batch = SimpleNamespace(prompt_lengths=torch.tensor(lengths.prompt), response_lengths=torch.tensor(lengths.output))
    report = GenInferReport(observations=rows)
    metrics = {"timing_s/train": 1.0, "timing_s/reshard": 0.1}
    said = layout_advice(draft, report, batch, metrics)
    assert said.startswith("layouts at what was measured (generation x") and " s an iteration" in said
    assert float(said.partition("these take ")[2].split()[0]) > 5.0
    warned = layout_advice(draft, report, batch, {})
    assert warned == "warning: layouts are not compared at what was measured (KeyError: 'timing_s/train')"
