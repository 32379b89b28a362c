"""The inputs of a run, all checked before it starts: models, tokenizer, prompts, reward function, checkpoint.

All ranks make the same checks from the same files before anything is launched; one process plans for all. Models are
not built; of checkpoints only config.json and the headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed
from rlhfuse.base.json_values import LARGEST
from rlhfuse.config.device_defaults import is_for_gpus
from rlhfuse.config.load import model_folder
from rlhfuse.config.rules import check_config
from rlhfuse.config.settings import RunConfig, TrainerConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import AUTO
from rlhfuse.costs.hardware import GPU_NAMES
from rlhfuse.costs.machine import Host
from rlhfuse.data.prompt_notes import prompt_notes
from rlhfuse.data.prompts import Prompt, PromptSet, load_prompts
from rlhfuse.data.reward_workers import RewardSum
from rlhfuse.models.hf import check_checkpoint
from rlhfuse.models.tokenizer import chat_tokens, fix_day, load_tokenizer, resolve_tokens
from rlhfuse.parallel.device import device_kind
from rlhfuse.planning.job import Job, StoredLayouts
from rlhfuse.planning.plan import Plan
from rlhfuse.run.checkpoint.checkpoint import METRICS, Checkpoint, check_resumed, checkpoints_in, find_checkpoint
from rlhfuse.run.checkpoint.compatibility import RunCompatibility
from rlhfuse.run.checkpoint.contents import contents_of
from rlhfuse.run.rank_models import ModelFolders
from rlhfuse.run.run_tools import RunTools, find_tools, tool_schemas
from rlhfuse.simulator.lengths import SampleLengths, load_lengths
from rlhfuse.tasks.role import POLICY, Role


@dataclass(frozen=True)
class RunInputs:
    """The inputs of a run that can be planned and fits, with its plan."""

    plan: Plan
    notes: tuple[str, ...]  # for people: on settings without effect, layouts that were auto, and tokens
    models: ModelFolders
    tokenizer: Any
    prompts: PromptSet
    val_prompts: PromptSet  # held out; may be empty
    facts: RunCompatibility
    resume: Checkpoint | None  # None: a fresh start
    tools: RunTools | None = None
    day: str = ""  # that chat templates write: of the run's first start

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def world_size(self) -> int:
        return self.plan.world_size


class Planner:
    """Plans in this process. Ranks have another one (handshake.py)."""

    def check(self, job: Job) -> None:
        """Raise InputError for settings that cannot be, whatever the lengths of samples: prompts take long to read."""
        from rlhfuse.planning.settle import check_job  # ranks do not import it

        check_job(job)

    def plan(self, job: Job) -> Plan:
        """The plan of a job. Raises InputError, or ScheduleError for a schedule that could hang."""
        from rlhfuse.planning.planner import plan_job

        return plan_job(job)


def check_inputs(
    config: RunConfig, world_size: int, dry: bool = False, planner: Planner | None = None, day: str = ""
) -> RunInputs:
    """Read and check everything, and plan. Raises InputError with one line that names the value and the fix.

    A `dry` run may be for GPUs that are not here, and compares models without tokenizer files by the size of their
    vocabularies. `day`: written by chat templates, in place of today.
    """
    planner = planner or Planner()
    device = device_of(config.trainer, planned=dry)
    check_config(config.with_(trainer={"device": device}))
    check_output(config)
    if config.trainer.wandb != "off" and find_spec("wandb") is None:
        raise InputError("trainer.wandb needs the wandb package: pip install 'rlhfuse[wandb]', or trainer.wandb=off")
    models = find_models(config)
    tokenizer = run_tokenizer(config, models.specs[POLICY])
    specs, notes = resolve_tokens(config.rollout, models.paths, models.specs, tokenizer, required=not dry)
    models = replace(models, specs=specs)
    job = Job(config, specs, world_size, this_host(config.trainer), device)
    planner.check(job)
    resume = find_checkpoint(config)
    day = (resume.manifest.state.position.get("day") if resume else None) or day or date.today().isoformat()
    fix_day(tokenizer, day)
    prompts, val_prompts = all_prompts(config, specs, tokenizer)
    job = replace(job, longest_prompt=longest_tokens((prompts, val_prompts)))
    data, every = config.data, (*prompts.prompts, *val_prompts.prompts)
    ends = {*specs[POLICY].eos_token_ids, *config.rollout.stop_token_ids, tokenizer.eos_token_id}
    notes += prompt_notes(tokenizer, every, ends, data.apply_chat_template, data.add_bos, data.chat_template_kwargs)
    tools = find_tools(config, specs[POLICY], tokenizer, every)
    if config.reward.function:
        job = replace(job, signature=check_reward_functions(config, every))
    if resume:
        saved = resume.manifest.facts
        job = replace(
            job,
            stored=StoredLayouts(str(resume.folder), saved.world_size, saved.layouts),
            recent=_left_out_before(resume, config),
            schedule_file=Path(config.trainer.output_dir) / "schedule.json" if config.trainer.output_dir else None,
        )
    for role in config.roles():
        check_checkpoint(models.paths[role], specs[role], role.scalar_head, role.fresh_head)
    plan = planner.plan(job)
    contents, compared = contents_of(plan.config, models.paths, Path(tokenizer.name_or_path)), plan.config
    if config.data.max_prompt_tokens == AUTO and len(prompts):  # held-out prompts may change from start to start
        compared = compared.with_(data={"max_prompt_tokens": len(prompts.longest.tokens)})
    compatible = RunCompatibility.of(compared, specs, plan.tasks, world_size, tokenizer.get_vocab(), contents)
    if resume:
        check_resumed(resume, plan.config, compatible)
    return RunInputs(
        plan, (*plan.notes, *notes), models, tokenizer, prompts, val_prompts, compatible, resume, tools, day
    )


def this_host(trainer: TrainerConfig) -> Host:
    """The machine as this process finds it, with its GPU by the planner's name where the run is on it."""
    on_gpu = trainer.device != "cpu" and torch.cuda.is_available()
    return Host.here(GPU_NAMES.get(torch.cuda.get_device_name(), "") if on_gpu else "")


def device_of(trainer: TrainerConfig, planned: bool = False) -> str:
    """This machine's device, cpu or cuda, for trainer.device=auto.

    Plan and run must be about the same device; what is only `planned` may be for GPUs that trainer.hardware names, on a
    machine without. Raises InputError where there is a GPU that torch cannot use.
    """
    if trainer.device != AUTO:
        return trainer.device
    return "cuda" if planned and is_for_gpus(trainer) else device_kind("auto")


def _left_out_before(resume: Checkpoint | None, config: RunConfig) -> SampleLengths | None:
    """Last samples of the run that is resumed, where training leaves some out and no other lengths are named."""
    if resume is None or config.parallel.lengths or not config.algorithm.skips:
        return None
    with suppress(InputError):  # lines that cannot be read are no reason not to go on
        recent = load_lengths(resume.folder.parent.parent / METRICS).recent
        return SampleLengths.joined(recent) if recent else None
    return None


def run_tokenizer(config: RunConfig, actor: ModelSpec) -> Any:
    """The tokenizer of prompts and responses. Raises InputError."""
    return load_tokenizer(model_folder(config.actor.tokenizer, "actor.tokenizer"), actor)


def read_prompts(config: RunConfig, tokenizer: Any, key: str = "train_files") -> PromptSet:
    """The prompts of the files of `data.KEY` as tokens; none where no file is named. Raises InputError."""
    data = config.data
    if not (files := getattr(data, key)):
        return PromptSet(())
    limits, in_turns = (data.max_prompt_tokens, data.filter_long_prompts), data.apply_chat_template
    return load_prompts(files, data.prompt_key, encoder(tokenizer, config), *limits, dialogues_as_turns=in_turns)


def all_prompts(config: RunConfig, specs: Mapping[Role, ModelSpec], tokenizer: Any) -> tuple[PromptSet, PromptSet]:
    """Prompts to train on and held-out ones.

    With data.max_prompt_tokens=auto, what leaves a response no room in some model's context is refused, or dropped with
    data.filter_long_prompts. Raises InputError as `read_prompts`, or naming file and line of the prompt and what would
    do.
    """
    if config.data.max_prompt_tokens != AUTO:
        train, val = (read_prompts(config, tokenizer, key) for key in ("train_files", "val_files"))
        return train, val
    unlimited = config.with_(data={"max_prompt_tokens": LARGEST})
    train, val = (read_prompts(unlimited, tokenizer, key) for key in ("train_files", "val_files"))
    train = _cut_to_context(config, specs, train, "rollout", config.rollout.max_response_tokens)
    return train, _cut_to_context(config, specs, val, "eval", config.eval_response_tokens)


def longest_tokens(prompts: Iterable[PromptSet]) -> int | None:
    """Tokens of the longest of all; None where there are none."""
    return max((len(some.longest.tokens) for some in prompts if len(some)), default=None)


def longest_prompt(config: RunConfig, specs: Mapping[Role, ModelSpec]) -> int | None:
    """For data.max_prompt_tokens=auto its number, for programs that need no prompts but for that."""
    if config.data.max_prompt_tokens != AUTO:
        return None
    try:
        return longest_tokens(all_prompts(config, specs, run_tokenizer(config, specs[POLICY])))
    except InputError as error:
        raise InputError(f"data.max_prompt_tokens=auto is read off the prompts: {error}; or give a number") from None


def _cut_to_context(
    config: RunConfig, specs: Mapping[Role, ModelSpec], prompts: PromptSet, group: str, response: int
) -> PromptSet:
    """Without what leaves no room for `response` tokens, GROUP.max_response_tokens, in some model's context."""
    if not len(prompts):
        return prompts
    (role, spec), longest = min(specs.items(), key=lambda item: item[1].context), prompts.longest
    kept = tuple(prompt for prompt in prompts.prompts if len(prompt.tokens) + response <= spec.context)
    dropped = len(prompts) - len(kept)
    if kept and (config.data.filter_long_prompts or not dropped):
        return PromptSet(kept, dropped)
    tokens, limit = len(longest.tokens), "sliding_window" if spec.sliding_window else "context"
    room = f"{group}.max_response_tokens={spec.context - tokens}" if tokens < spec.context else "shorter prompts"
    drop = ", or data.filter_long_prompts=true to drop such rows" if kept else ""
    raise InputError(
        f"{longest.where}: the longest prompt has {tokens} tokens, and with {group}.max_response_tokens({response}) "
        f"{tokens + response} > {limit}({spec.context}) of {role}; use {room}{drop}"
    )


def own_tokenizer(config: RunConfig) -> Path | None:
    """The folder of actor.tokenizer, unless it is the actor's own: what the run trains reads its tokens."""
    name = config.actor.tokenizer
    return None if name == config.actor.path else model_folder(name, "actor.tokenizer")


def check_reward_functions(config: RunConfig, prompts: Iterable[Prompt]) -> str:
    """Import the functions and hold them against every row; returns their signature.

    Raises InputError naming function, file and line.
    """
    reward, tools = config.reward, config.rollout.multi_turn.function_tool_path
    functions = RewardSum.load(reward.function, reward.signature, tools=tools).functions
    for prompt in prompts:
        for function in functions:
            function.check(prompt.row, prompt.text, prompt.where)
    return "trl" if functions[0].signature == "trl" else "verl"


def find_models(config: RunConfig) -> ModelFolders:
    """Local folder and shape of each role of the run; the critic's defaults to the reward model's."""
    order = sorted(config.roles(), key=lambda role: len(role.starts_from))  # what others default to first
    resolved = {role: model_folder(getattr(config, role).path, f"{role}.path", weights=True) for role in order}
    paths = {role: resolved[role] for role in config.roles()}
    return ModelFolders(paths, {role: ModelSpec.from_config(path, role) for role, path in paths.items()})


def encoder(tokenizer: Any, config: RunConfig) -> Callable[[Any], list[int]]:
    """Text or chat turns -> token ids, as config.data says, with the schemas of tools."""
    words = config.data.chat_template_kwargs | ({"tools": tools} if (tools := tool_schemas(config)) else {})
    add = {"auto": None, "true": True, "false": False}[config.data.add_bos]

    def encode(prompt: Any) -> list[int]:
        if not isinstance(prompt, str) or config.data.apply_chat_template:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return chat_tokens(tokenizer, turns, **words)
        if add is None:
            return tokenizer(prompt)["input_ids"]
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        if add and tokenizer.bos_token_id is None:
            raise InputError("data.add_bos=true, but the tokenizer has no beginning-of-text token; use auto")
        return [tokenizer.bos_token_id, *ids] if add else ids

    return encode


def check_output(config: RunConfig) -> None:
    """Refuse an output folder that holds a run not to be continued, or that cannot be written."""
    if not config.trainer.output_dir:
        return
    folder, resume = Path(config.trainer.output_dir), config.trainer.resume
    saved = bool(checkpoints_in(folder)) or is_listed(folder / "finished.json")
    if (saved or (folder / METRICS).exists()) and resume == "never":
        fix = "choose another folder or set trainer.resume=auto"
        raise InputError(f"trainer.output_dir={folder} holds a run already; {fix}")
    if saved and resume not in ("auto", "never") and folder.resolve() not in Path(resume).resolve().parents:
        fault = f"trainer.output_dir={folder} holds another run than trainer.resume={resume}"
        raise InputError(f"{fault}; choose another folder")
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"trainer.output_dir={folder} cannot be written: {parent} is no folder with write permission")
