"""The job that a plan is asked for: the configuration as given, and everything else that resolving it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.machine import Host
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.role import Role


@dataclass(frozen=True)
class StoredLayouts:
    """How a run lay on its ranks when it saved a checkpoint, which people know as `where`."""

    where: str
    world_size: int
    layouts: Mapping[str, str]  # task -> layout, and dotted key -> value of settings that change the order of sums


@dataclass(frozen=True)
class Job:
    """`device`: for trainer.device=auto, auto where that stays open; the GPU of `host` is for trainer.hardware=auto.

    `longest_prompt`: tokens, for data.max_prompt_tokens=auto. `signature`: of reward.function. Of the checkpoint that
    is resumed: `stored` layouts, `recent` lengths of samples where training leaves some out, and `schedule_file`, which
    may not exist.
    """

    config: RunConfig
    specs: Mapping[Role, ModelSpec]
    world_size: int
    host: Host = field(default_factory=lambda: Host.here())
    device: str = AUTO
    longest_prompt: int | None = None
    signature: str = AUTO
    stored: StoredLayouts | None = None
    recent: SampleLengths | None = None
    schedule_file: Path | None = None
