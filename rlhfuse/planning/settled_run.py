"""A run of which nothing is left open: what every draft, price and search below it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhfuse.config.rules import idle_settings
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.machine import Host
from rlhfuse.decisions.layout_rules import LayoutRules
from rlhfuse.planning.job import Job
from rlhfuse.tasks.role import Role


@dataclass(frozen=True)
class SettledRun:
    """`config` has a value wherever that of the job leaves one open; a search of layouts starts from one in which
    layouts are open. `lines`: for people, on choices."""

    job: Job
    config: RunConfig
    lines: tuple[str, ...] = ()

    @property
    def specs(self) -> Mapping[Role, ModelSpec]:
        return self.job.specs

    @property
    def world_size(self) -> int:
        return self.job.world_size

    @property
    def host(self) -> Host:
        return self.job.host

    @property
    def rules(self) -> LayoutRules:
        """What its table of layouts must keep."""
        return LayoutRules(self.config, self.specs, self.world_size)

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

    @property
    def without_effect(self) -> str:
        """A line that names what was set and has no effect on this device, or ''."""
        return idle_settings(self.job.config.with_(trainer={"device": self.config.trainer.device}))

    def with_config(self, config: RunConfig) -> SettledRun:
        """The same with other values, such as a table of layouts."""
        return replace(self, config=config)
