"""Which ranks stand for all, and their rehearsals, one process after another."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.base.launcher import module_command
from rlhfuse.config.load import read_specs
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.planning.candidate import Candidate, draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.settle import settle

WHOLE = ("iteration", "checkpoint")  # after the start
PHASES = ("iteration", "moves", "generation", "inference", "training", "checkpoint")  # to be asked for


def rehearsal_draft(config: RunConfig, world_size: int) -> Candidate:
    """The draft of a run on GPUs, from the models' config.json alone. Raises InputError."""
    if config.trainer.device == "cpu":
        raise InputError("trainer.device=cpu: a run on CPUs needs no rehearsal; set trainer.device=cuda")
    if config.data.max_prompt_tokens == AUTO:
        raise InputError("data.max_prompt_tokens=auto is known from the prompts; give a number to rehearse with")
    config = config.with_(
        algorithm={"filter_groups": {"enable": False}},  # nothing scores
        trainer={"device": "cuda"},
    )
    specs = read_specs(config)
    return draft_plan(settle(Job(config, specs, world_size)))


def places_of(draft: Candidate, rank: int) -> tuple[int, ...]:
    """Where a rank stands in a pipeline of each model that trains."""
    return tuple(draft.ranks.locate(model, rank)[1] for model in draft.ranks.shape.layouts)


def distinct_ranks(draft: Candidate) -> tuple[int, ...]:
    """The first rank of each combination of stages of the models that train."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(draft.run.world_size):
        first.setdefault(places_of(draft, rank), rank)
    return tuple(first.values())


def planned_bytes(draft: Candidate, plan: Plan, rank: int) -> dict[str, int]:
    """What the phases of a rank hold on the device, and the rank in host memory, as planned.

    A checkpoint is saved when training is over, and resumed before anything else is there.
    """
    budget = draft.memory.with_generation_kept() if plan.keeps_generation else draft.memory
    phases = budget.of(places_of(draft, rank)).phases(draft.memory.held_by(*plan.schedules.values()))
    trained, begun = phases[-1], draft.memory.of(places_of(draft, rank)).static[-1]
    others = {"checkpoint": trained.device - trained.activations, "resume": begun.weights + begun.optimizer}
    return {phase.phase: phase.device for phase in phases} | others | {"host": phases[-1].host}


def rehearse(
    config: Path,
    overrides: Sequence[str],
    plan: Plan,
    rank: int,
    phases: Sequence[str],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """A RankRehearsal as a dict, from a process of its own. Raises CalledProcessError after that has said why."""
    world_size = plan.world_size
    job = dict(config=str(config), overrides=list(overrides), world_size=world_size, rank=rank, phases=list(phases))
    with tempfile.TemporaryDirectory() as folder:
        asked, out = Path(folder) / "job.json", Path(folder) / "out.json"
        asked.write_text(json.dumps(job | {"plan": plan.to_text()}))
        words = module_command("rehearsal.process", str(asked), str(out))
        # kernels are to be launched, not interpreted
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        places = str(Path(__file__).parent.parent), environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # where this package is found
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            for line in process.stdout:
                progress(line.rstrip())
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, words)
        return json.loads(out.read_text())
