"""A configuration of four ranks, the shapes of its models, and its plan, without files."""

from dataclasses import replace
from functools import cache

import pytest

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs import hardware, machine
from rlhfuse.planning.candidate import Candidate, draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.settle import settle
from rlhfuse.simulator.lengths import SampleLengths

TINY = ModelSpec("llama", 8, 64, 8, 4, 8, 192, 512, 512)
SPECS = {role: TINY for role in ("actor", "critic", "reference", "reward")}


def config(**keys) -> RunConfig:
    """A run on 4 ranks; keyword `parallel__generation="d2t2p1"` sets parallel.generation."""
    layouts = dict(actor_train="d1t1p4", critic_train="d2t1p2", generation="d4t1p1")
    inference = dict.fromkeys(("inference", "reference_inference", "reward_inference", "critic_inference"), "d4t1p1")
    settings = {f"parallel__{name}": layout for name, layout in {**layouts, **inference}.items()}
    groups: dict[str, dict] = {
        "data": {"max_prompt_tokens": 128},
        "algorithm": {"minibatches": 4},
        "fusion": {"actor_microbatches": 4},
    }
    for key, value in {**settings, **keys}.items():
        group, _, name = key.partition("__")
        groups.setdefault(group, {})[name] = value
    return RunConfig().with_(**groups)


def run(**keys) -> RunConfig:
    """The same with no search time to speak of."""
    return config(**{"fusion__search_seconds": 0.2, **keys})


def on_slow_cores(patch: pytest.MonkeyPatch) -> None:
    """The cpu has cores to which products are dear and starts cheap."""
    table = hardware.known_hardware()
    slow = dict(flops=20e9, memory_bandwidth=8e9, collective_seconds=65e-6, cross_collective_seconds=65e-6)
    slow |= dict(launch_seconds=20e-6, pass_seconds=0.0, moved_share=1.0)
    patch.setattr(hardware, "known_hardware", lambda: {**table, "cpu": replace(table["cpu"], **slow)})


def with_cores(patch: pytest.MonkeyPatch, cores: float) -> None:
    """Machines have so many."""
    here = replace(machine.Host.here(), cores=cores)
    patch.setattr(machine.Host, "here", staticmethod(lambda gpu="": here))


def full(made: RunConfig) -> SampleLengths:
    """Samples that are all as long as they can become."""
    return SampleLengths((made.data.max_prompt_tokens,), (made.rollout.max_response_tokens,))


def drafted(made: RunConfig, specs=SPECS, world_size=4, lengths=None, **found) -> Candidate:
    """The draft of a run as its programs settle it; `found`: further facts."""
    return draft_plan(settle(Job(made, specs, world_size, **found)), lengths)


def planned(made: RunConfig, specs=SPECS, lengths=None) -> Plan:
    return make_plan(drafted(made, specs, 4, lengths))


@cache
def shared_plan(**keys) -> Plan:
    """The plan of `run(**keys)` on the machine as it is, made once."""
    return planned(run(**keys))
