"""What a checkpoint and the run that continues it must have in common, and what may differ.

models, vocabulary, settings that change a number    must be equal: anything else would be another run
files that these settings name                       may move, but not change
world size, layouts, number of micro-batches         may differ: they change the order of sums, so about 1e-5
where, how long, how watched, evaluated, and when    are not looked at: they change nothing
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.tasks.role import Role
from rlhfuse.tasks.task import ModelTask

FREE_GROUPS = ("fusion", "trainer", "parallel", "eval")  # layouts are compared as layouts, with their defaults filled
FREE_KEYS = (
    "reward.timeout_seconds",
    "reward.workers",
    "data.val_files",
    "rollout.draft_rows",
    "rollout.multi_turn.replay",
    "rollout.multi_turn.timeout_seconds",
    "rollout.multi_turn.workers",
    "algorithm.skip_zero_gradients",
)  # of the other groups, yet change no number
FIXED_KEYS = ("trainer.seed", "trainer.dtype")  # of the free groups, yet change numbers
WITH_KEYS = {  # change a number only where the other key is set
    "reward.signature": "reward.function",
    "data.max_prompt_tokens": "data.filter_long_prompts",  # else it refuses prompts, and one file has the same
}
# These change the order of sums, like a layout.
ORDER_KEYS = (
    "fusion.microbatch_tokens",
    "fusion.actor_microbatches",
    "parallel.sequence_parallel",
    "algorithm.skip_zero_gradients",
)


def new_run_from(where: str) -> str:
    """What goes on with other settings than the checkpoint `where` was saved with."""
    return f"begin another run from its weights: tools/convert_checkpoint.py {where} --out HF, actor.path=HF/actor"


def shape_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a ModelSpec as a checkpoint has them; those that are younger than it have their defaults."""
    return {field.name: field.default for field in fields(ModelSpec) if field.default is not MISSING} | dict(stored)


@dataclass(frozen=True)
class RunCompatibility:
    """The facts of one run."""

    world_size: int
    layouts: Mapping[str, str]  # task -> layout, and the settings of ORDER_KEYS
    models: Mapping[str, Mapping[str, Any]]  # role -> fields of its ModelSpec
    vocabulary: str  # digest of the tokenizer's tokens
    settings: Mapping[str, Any]  # dotted key -> value, of keys that change a number
    contents: Mapping[str, str] = field(default_factory=dict)  # of these, keys that name files -> digest of those

    @staticmethod
    def of(
        config: RunConfig,
        specs: Mapping[Role, ModelSpec],
        tasks: tuple[ModelTask, ...],
        world_size: int,
        vocabulary: Mapping[str, int],
        contents: Mapping[str, str],
    ) -> RunCompatibility:
        """In JSON's values, so that what was read compares equal to what was written. `vocabulary`: token -> id."""
        flat = {key: value for key, value, _ in config.leaves()}
        free = {k for k in flat if k in FREE_KEYS or k.split(".")[0] in FREE_GROUPS and k not in FIXED_KEYS}
        facts = RunCompatibility(
            world_size,
            {task.name: str(task.layout) for task in tasks} | {key: str(flat[key]) for key in ORDER_KEYS},
            {role: asdict(spec) for role, spec in specs.items()},
            hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest(),
            {key: value for key, value in flat.items() if key not in free},
            contents,
        )
        return RunCompatibility(**json.loads(json.dumps(asdict(facts))))

    def check(self, other: RunCompatibility, where: str) -> None:
        """Raise InputError naming facts of the checkpoint `other` with which this run cannot go on."""
        if other.models.keys() != self.models.keys():
            raise InputError(
                f"{where} has the models {', '.join(sorted(other.models))}, this run {', '.join(sorted(self.models))}; "
                "set algorithm.name, reference.path, reward.path and reward.function as they were"
            )
        for role, shape in self.models.items():
            for name, value in shape.items():
                if (stored := shape_of(other.models[role]).get(name)) != value:
                    raise InputError(
                        f"{where} has a {role} of {name}={stored}, {role}.path holds one of {value}; use the same model"
                    )
        if other.vocabulary != self.vocabulary:
            raise InputError(f"{where} was saved with another vocabulary; set actor.tokenizer to the tokenizer it had")
        defaults = RunConfig().leaves()  # of keys that a checkpoint is older than
        defaults = json.loads(json.dumps({key: value for key, value, _ in defaults}))
        told = []
        idle = {key for key, needed in WITH_KEYS.items() if not self.settings.get(needed)}
        for key in sorted((self.settings.keys() | other.settings.keys()) - idle):
            mine, stored = self.settings.get(key), other.settings.get(key, defaults.get(key))
            if key in self.contents and key in other.contents:
                if self.contents[key] != other.contents[key]:
                    told.append(f"other contents of {key} ({stored}); bring them back")
            elif mine not in (stored, [stored]):  # one function of a list was a text
                told.append(f"{key}={stored}, this run has {mine}; set {key}={stored}")
        if told:
            raise InputError(f"{where} was saved with {'; with '.join(told)}; or {new_run_from(where)}")

    def layout_diff(self, other: RunCompatibility) -> str:
        """How this run lies on its ranks otherwise than `other` did, '' where it does not."""
        before = {key: str(value) for key, value, _ in RunConfig().leaves() if key in ORDER_KEYS} | dict(other.layouts)
        changed = [] if other.world_size == self.world_size else [f"{other.world_size} -> {self.world_size} ranks"]
        changed += [
            f"{task} {before.get(task)} -> {layout}"
            for task, layout in self.layouts.items()
            if before.get(task) != layout
        ]
        return ", ".join(changed)
