"""The child that plans: its plan is that of this process, its errors arrive, and it leaves with its parent."""

import os
import signal
from contextlib import closing

import pytest
from testkit.four_ranks import SPECS, config

from rlhfuse.base.errors import InputError
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.planning.job import Job
from rlhfuse.planning.planner import plan_job
from rlhfuse.planning.planning_process import PlanningProcess
from rlhfuse.tasks.role import role_named

# without a search, which a clock would cut short
ROLES = {role_named(name): spec for name, spec in SPECS.items()}


def job(**keys) -> Job:
    return Job(resolve_device(config(**{"fusion__intra_stage": "serial", **keys})), ROLES, 4)


def test_the_plan_is_that_of_this_process():
    with closing(PlanningProcess()) as planning:
        planning.check(job())
        plan, own = planning.plan(job()), plan_job(job())
        with pytest.raises(InputError, match="d3t1p1"):
            planning.check(job(parallel__generation="d3t1p1"))
        planning.check(job())  # an answer that was an error is not the last
    assert plan.to_text() == own.to_text() and plan.costs == own.costs
    assert planning._child.returncode == -signal.SIGKILL


def test_a_child_that_dies_is_named():
    with closing(PlanningProcess()) as planning:
        os.kill(planning._child.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="planning process ended with exit code -9"):
            planning.plan(job())
