"""The inputs of a run, all checked before it starts: models, tokenizer, prompts, reward function, checkpoint.

All ranks make the same checks from the same files before anything is launched, so that all of them end with exit code
2 and rank 0 alone prints the line. Models are not built; of checkpoints only config.json and the headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.checkpoint.checkpoint import METRICS, Checkpoint, checkpoints_in, find_checkpoint
from rlhfuse.checkpoint.compatibility import RunCompatibility
from rlhfuse.checkpoint.contents import contents_of
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.data.prompts import PromptSet, load_prompts
from rlhfuse.data.reward_function import RewardFunction
from rlhfuse.models.hf import check_checkpoint, resolve_checkpoint
from rlhfuse.models.tokenizer import load_tokenizer, resolve_tokens
from rlhfuse.planning.draft import PlanDraft, draft_plan
from rlhfuse.run.rank_models import ModelFolders


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run that can be planned and fits; the plan itself is made from `draft`."""

    draft: PlanDraft
    notes: tuple[str, ...]  # on tokens, for people
    models: ModelFolders
    tokenizer: Any
    prompts: PromptSet
    facts: RunCompatibility
    resume: Checkpoint | None  # None: a fresh start

    @property
    def config(self) -> RunConfig:
        return self.draft.config

    @property
    def world_size(self) -> int:
        return self.draft.world_size


def check_inputs(config: RunConfig, world_size: int, dry: bool = False) -> RunInputs:
    """Read and check everything. Raises InputError with one line that names the value and the fix.

    A `dry` run compares models without tokenizer files by the size of their vocabularies.
    """
    check_output(config)
    if config.trainer.wandb != "off" and find_spec("wandb") is None:
        raise InputError("trainer.wandb needs the wandb package: pip install 'rlhfuse[wandb]', or trainer.wandb=off")
    models = find_models(config)
    tokenizer = run_tokenizer(config, models.specs[Role.ACTOR])
    specs, notes = resolve_tokens(config, models.paths, models.specs, tokenizer, required=not dry)
    models = replace(models, specs=specs)
    _check_inference_layouts(config)
    draft = draft_plan(config, specs, world_size)
    for role in config.roles():
        check_checkpoint(models.paths[role], specs[role], role.scalar_head, role.fresh_head)
    prompts = read_prompts(config, tokenizer)
    if config.reward.function:
        check_reward_function(config, prompts)
    contents = contents_of(config, models.paths, Path(tokenizer.name_or_path))
    facts = RunCompatibility.of(config, specs, draft.tasks, world_size, tokenizer.get_vocab(), contents)
    return RunInputs(draft, notes, models, tokenizer, prompts, facts, find_checkpoint(config, facts))


def run_tokenizer(config: RunConfig, actor: ModelSpec) -> Any:
    """The tokenizer of prompts and responses. Raises InputError."""
    return load_tokenizer(resolve_checkpoint(config.actor.tokenizer, "actor.tokenizer"), actor)


def read_prompts(config: RunConfig, tokenizer: Any) -> PromptSet:
    """The run's prompts as tokens. Raises InputError naming file, line or key."""
    data = config.data
    return load_prompts(
        data.train_files,
        data.prompt_key,
        encoder(tokenizer, config),
        data.max_prompt_tokens,
        data.filter_long_prompts,
        dialogues_as_turns=data.apply_chat_template,
    )


def own_tokenizer(config: RunConfig) -> Path | None:
    """The folder of actor.tokenizer, unless it is the actor's own: what the run trains reads its tokens."""
    name = config.actor.tokenizer
    return None if name == config.actor.path else resolve_checkpoint(name, "actor.tokenizer")


def check_reward_function(config: RunConfig, prompts: PromptSet) -> None:
    """Import the function and hold it against every row. Raises InputError naming function, file and line."""
    loaded = RewardFunction.load(config.reward.function, config.reward.signature)
    for prompt in prompts.prompts:
        loaded.check(prompt.row, prompt.text, prompt.where)


def find_models(config: RunConfig) -> ModelFolders:
    """Local folder and shape of each role of the run; the critic's defaults to the reward model's."""
    order = sorted(config.roles(), key=lambda role: len(role.path_defaults))  # what others default to first
    resolved = {role: resolve_checkpoint(getattr(config, role).path, f"{role}.path") for role in order}
    paths = {role: resolved[role] for role in config.roles()}
    return ModelFolders(paths, {role: ModelSpec.from_config(path) for role, path in paths.items()})


def encoder(tokenizer: Any, config: RunConfig) -> Callable[[Any], list[int]]:
    """Text or chat turns -> token ids, as config.data says."""
    add = {"auto": None, "true": True, "false": False}[config.data.add_bos]

    def encode(prompt: Any) -> list[int]:
        if not isinstance(prompt, str) or config.data.apply_chat_template:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if tokenizer.chat_template is None:
                raise InputError("the prompts are chat turns, but the tokenizer has no chat template; use text prompts")
            try:
                return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template may refuse turns in any way
                raise InputError(f"the tokenizer's chat template refuses the turns ({error})") from None
        if add is None:
            return tokenizer(prompt)["input_ids"]
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if add and tokenizer.bos_token_id is None:
            raise InputError("data.add_bos=true, but the tokenizer has no beginning-of-text token; use auto")
        return [tokenizer.bos_token_id, *ids] if add else ids

    return encode


def _check_inference_layouts(config: RunConfig) -> None:
    rows = {f"{role}_inference": getattr(config.parallel, f"{role}_inference") for role in config.scorers()}
    if len({str(ParallelLayout.parse(text)) for text in rows.values()}) > 1:
        told = ", ".join(f"parallel.{name}={text}" for name, text in rows.items())
        raise InputError(f"{told}: different layouts of these are not yet runnable; set parallel.inference alone")


def check_output(config: RunConfig) -> None:
    """Refuse an output folder that holds a run not to be continued, or that cannot be written."""
    if not config.trainer.output_dir:
        return
    folder, resume = Path(config.trainer.output_dir), config.trainer.resume
    saved = bool(checkpoints_in(folder)) or (folder / "finished.json").exists()
    if (saved or (folder / METRICS).exists()) and resume == "never":
        fix = "choose another folder or set trainer.resume=auto"
        raise InputError(f"trainer.output_dir={folder} holds a run already; {fix}")
    if saved and resume not in ("auto", "never") and folder.resolve() not in Path(resume).resolve().parents:
        fault = f"trainer.output_dir={folder} holds another run than trainer.resume={resume}"
        raise InputError(f"{fault}; choose another folder")
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"trainer.output_dir={folder} cannot be written: {parent} is no folder with write permission")
