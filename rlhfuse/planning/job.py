"""The job that a plan is asked for: the configuration and everything else that a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.machine import Host
from rlhfuse.decisions.layout_rules import LayoutRules
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
    """`config` as given, or as `settle` resolves it: then `asked` was given, and `lines` tell people of choices.

    `device`: for trainer.device=auto, auto where that stays open; the GPU of `host` is for trainer.hardware=auto.

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
    asked: RunConfig | None = None
    lines: tuple[str, ...] = ()

    @property
    def rules(self) -> LayoutRules:
        """What its table of layouts must keep."""
        return LayoutRules(self.config, self.specs, self.world_size)

    @property
    def given(self) -> RunConfig:
        """The configuration as it was given."""
        return self.asked or self.config

    @property
    def tied(self) -> frozenset[Role]:
        """Models that train with their embedding as output layer; a scalar head is one of their own."""
        return frozenset(
            role for role in self.config.trained() if self.specs[role].tied_embeddings and not role.scalar_head
        )

    @property
    def norms_by_pipeline(self) -> frozenset[Role]:
        """Models that train with an optimizer that takes norms of gradients by pipeline."""
        return frozenset(role for role in self.config.trained() if getattr(self.config, role).optim.name != "adam")

    def with_config(self, config: RunConfig) -> Job:
        """The same with other values, such as a table of layouts."""
        return replace(self, config=config, asked=self.given)
