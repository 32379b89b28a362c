"""Seconds and bytes that no run of a table goes below, cheap enough to be asked of every table.

A price lies above its floors, and a table that is refused for its floor's bytes would be refused for its own
(tests/planning/search). Each floor of training is cached: what tables share is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from rlhfuse.config.role import Role
from rlhfuse.costs.analytic import AnalyticCost
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.job_cost import JobCost
from rlhfuse.costs.stage_cut import MicrobatchTokens
from rlhfuse.planning.draft import DraftInputs, fastest_cost, step_costs, training_costs
from rlhfuse.planning.efficiency import optimizer_step_seconds
from rlhfuse.planning.search.space import TrainingRow
from rlhfuse.planning.stage_cuts import stage_seconds
from rlhfuse.planning.training_problem import TICK_SECONDS, stage_costs
from rlhfuse.schedule.ir.problem import FusionProblem, StageCosts, fused_problem
from rlhfuse.schedule.rules.builders import min_memory
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths
