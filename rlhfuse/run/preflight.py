"""Every check that can be made before anything is launched, and what it reads on the way.

All ranks make the same checks from the same files, so that all of them end with exit code 2 and rank 0 alone
prints the line. Models are not built here; of checkpoints only config.json and the headers are read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhfuse.checkpoint.checkpoint import Checkpoint, checkpoints_in, find_checkpoint
from rlhfuse.checkpoint.compatibility import RunCompatibility
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.costs.analytic import AnalyticCost, CostModel
from rlhfuse.data.prompts import PromptSet, load_prompts
from rlhfuse.data.reward_function import RewardFunction
from rlhfuse.decisions.layouts import BatchArithmetic, Task, batch_arithmetic, check_layouts, training_layouts
from rlhfuse.errors import InputError
from rlhfuse.models.hf import check_checkpoint, load_tokenizer, resolve_checkpoint
from rlhfuse.planning.memory_check import memory_limit, refuse_unless_fits, run_memory
from rlhfuse.planning.planner import (
    check_threshold,
    element_bytes,
    hardware_of,
    kv_blocks,
    starting_costs,
    task_costs,
    training_problem,
)
from rlhfuse.run.roles import Checkpoints
from rlhfuse.schedule.io import load_schedule
from rlhfuse.schedule.ir.problem import FusionProblem
from rlhfuse.schedule.ir.ranks import FusedRanks, rank_map
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.simulator.threshold import load_threshold


@dataclass(frozen=True)
class Prepared:
    """A run whose inputs were all found good."""

    config: RunConfig
    world_size: int
    checkpoints: Checkpoints
    tokenizer: Any
    prompts: PromptSet
    tasks: tuple[Task, ...]
    ranks: FusedRanks
    problem: FusionProblem
    facts: RunCompatibility
    resume: Checkpoint | None  # None: a fresh start
    costs: CostModel  # of generation and inference, until the run has measured its own
    costs_name: str

    @property
    def tied(self) -> frozenset[str]:
        """Trained models whose output layer is their embedding; the critic has a head of its own."""
        return frozenset({"actor"} if self.checkpoints.specs["actor"].tied_embeddings else ())


def prepare(config: RunConfig, world_size: int) -> Prepared:
    """Check everything. Raises InputError with one line that names the value and the fix."""
    check_output(config)
    if config.trainer.wandb != "off" and find_spec("wandb") is None:
        raise InputError("trainer.wandb needs the wandb package: pip install 'rlhfuse[wandb]', or trainer.wandb=off")
    checkpoints = find_checkpoints(config)
    specs = checkpoints.specs
    tasks = check_layouts(config, specs, world_size)
    _check_inference_layouts(config)
    for role, path in checkpoints.paths.items():
        check_checkpoint(path, specs[role], role.scalar_head, role.fresh_head)
    tokenizer = load_tokenizer(resolve_checkpoint(config.actor.tokenizer, "actor.tokenizer"), specs["actor"])
    prompts = load_prompts(
        config.data.train_files,
        config.data.prompt_key,
        encoder(tokenizer, config),
        config.data.max_prompt_tokens,
        config.data.filter_long_prompts,
        dialogues_as_turns=config.data.apply_chat_template,
    )
    if config.reward.function:
        check_reward_function(config, prompts)
    ranks = rank_map(training_layouts(tasks))
    hardware = hardware_of(config)
    costs = task_costs(config, specs, tasks, hardware)
    tokens = config.data.max_prompt_tokens + config.rollout.max_response_tokens / 2
    batch = batch_arithmetic(config, tasks)
    problem = training_problem(costs, batch, tokens)
    if config.fusion.schedule:
        load_schedule(config.fusion.schedule, expect=problem)
    if config.fusion.threshold_file:
        check_threshold(load_threshold(config.fusion.threshold_file), config, batch)
    _check_memory(config, world_size, specs["actor"], costs, batch)
    facts = RunCompatibility.of(config, specs, tasks, world_size, tokenizer.get_vocab())
    resume = find_checkpoint(config, facts)
    priced = starting_costs(config, specs, costs, world_size)
    return Prepared(config, world_size, checkpoints, tokenizer, prompts, tasks, ranks, problem, facts, resume, *priced)


def _check_memory(
    config: RunConfig, world_size: int, actor: ModelSpec, costs: Mapping[str, AnalyticCost], batch: BatchArithmetic
) -> None:
    """Refuse a run that cannot fit even with the leanest schedule, when all samples become as long as they can."""
    full = training_problem(costs, batch, config.data.max_prompt_tokens + config.rollout.max_response_tokens)
    hardware = costs["generation"].hardware
    token_bytes = actor.kv_bytes_per_token(element_bytes(config))
    capacity = kv_blocks(config, batch.instances) * config.rollout.block_tokens * token_bytes
    phases = run_memory(config, costs, batch, capacity, serial_1f1b(full))
    refuse_unless_fits(phases, hardware, memory_limit(config, hardware, world_size))


def check_reward_function(config: RunConfig, prompts: PromptSet) -> None:
    """Import the function and hold it against every row. Raises InputError naming function, file and line."""
    loaded = RewardFunction.load(config.reward.function, config.reward.signature)
    for prompt in prompts.prompts:
        loaded.check(prompt.row, prompt.text, prompt.where)


def find_checkpoints(config: RunConfig) -> Checkpoints:
    """Local folder and shape of each role of the run; the critic's defaults to the reward model's."""
    order = sorted(config.roles(), key=lambda role: len(role.path_defaults))  # what others default to first
    found = {role: resolve_checkpoint(getattr(config, role).path, f"{role}.path") for role in order}
    paths = {role: found[role] for role in config.roles()}
    return Checkpoints(paths, {role: ModelSpec.from_config(path) for role, path in paths.items()})


def encoder(tokenizer: Any, config: RunConfig):
    """Text or chat turns -> token ids, as config.data says."""
    add = {"auto": None, "true": True, "false": False}.get(str(config.data.add_bos).lower())
    if str(config.data.add_bos).lower() not in ("auto", "true", "false"):
        raise InputError(f"data.add_bos={config.data.add_bos!r} must be auto, true or false")

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
    holds_a_run = (folder / "metrics.jsonl").exists() or bool(checkpoints_in(folder))
    if holds_a_run and resume == "never":
        raise InputError(
            f"trainer.output_dir={folder} holds a run already; choose another folder or set trainer.resume=auto"
        )
    if holds_a_run and resume != "auto" and folder.resolve() not in Path(resume).resolve().parents:
        raise InputError(
            f"trainer.output_dir={folder} holds another run than trainer.resume={resume}; choose another folder"
        )
    parent = folder
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(f"trainer.output_dir={folder} cannot be written: {parent} is no folder with write permission")
