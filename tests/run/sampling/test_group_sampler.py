"""How the groups of a round are judged; whole rounds are in tests/fusion/inter and tests/run."""

from types import SimpleNamespace

import torch

from rlhfuse.base.sample_ids import sample_id
from rlhfuse.config.settings import RewardConfig
from rlhfuse.decisions.group_selection import GroupSelection
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.ppo.rollout import Rollout
from rlhfuse.run.sampling.group_sampler import GroupSampler


def test_a_failed_sample_does_not_make_its_group_differ():
    """One sample of the first place failed and the others are equal; the second has one left, the third none; the
    fourth differs without the one that failed."""
    scores = [[1.0, 1.0, 9.0], [1.0, 9.0, 8.0], [7.0, 8.0, 9.0], [1.0, 2.0, 2.0]]
    failed = [[False, False, True], [False, True, True], [True, True, True], [False, False, True]]
    rollouts = [
        Rollout(sample_id(0, place, copy), (1,), (2,), torch.zeros(1), "stop", failed=failed[place][copy])
        for place in range(4)
        for copy in range(3)
    ]
    said = {sample_id(0, place, copy): score for place, row in enumerate(scores) for copy, score in enumerate(row)}
    sampler = GroupSampler.__new__(GroupSampler)
    sampler._config = SimpleNamespace(reward=RewardConfig(function_weight=2.0))
    judged = sampler._scores(GenInferReport(rollouts=rollouts, function_scores=said))
    assert judged == {0: [2.0, 2.0], 1: [2.0], 2: [], 3: [2.0, 4.0]}
    assert GroupSelection(1, 4).with_scores(judged).accepted == (3,)
