"""A run of which nothing is left open: what every draft, price and search below it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhfuse.config.role import Role
from rlhfuse.config.rules import idle_settings
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.machine import Host


@dataclass(frozen=True)
class SettledRun:
    """`config` has a value wherever `asked`, the configuration as it was given, leaves one open; a search of layouts
    starts from one in which those are. `lines`: for people, on what was chosen."""

    asked: RunConfig
    config: RunConfig
    specs: Mapping[Role, ModelSpec]
    world_size: int
    host: Host
    lines: tuple[str, ...] = ()

    @property
    def without_effect(self) -> str:
        """A line that names what was set and has no effect on this device, or ''."""
        return idle_settings(self.asked.with_(trainer={"device": self.config.trainer.device}))

    def with_config(self, config: RunConfig) -> SettledRun:
        """The same with other values, such as a table of layouts."""
        return replace(self, config=config)
