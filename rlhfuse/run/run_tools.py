"""The tools of a run, found and checked before it starts: what may be called, and how the chat template writes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.data.chat_turns import ChatTurns
from rlhfuse.data.prompts import Prompt
from rlhfuse.data.tool_journal import check_replay
from rlhfuse.data.tool_set import KEY, OWN, ToolSet
from rlhfuse.models.tokenizer import tool_schema


@dataclass(frozen=True)
class RunTools:
    """What samples may call between turns, and how their turns are read and written."""

    tools: ToolSet
    turns: ChatTurns


def tool_schemas(config: RunConfig) -> list[dict[str, Any]]:
    """What prompts and turns are rendered with; empty without tools. Raises InputError naming tool and fix."""
    settings = config.rollout.multi_turn
    if not settings.enable:
        return []
    functions = ToolSet.load(settings.function_tool_path).instances()
    where = f"{KEY}={settings.function_tool_path}"
    return [tool_schema(function, OWN, f"{where}, tool {name}") for name, function in functions.items()]


def find_tools(config: RunConfig, actor: ModelSpec, tokenizer: Any, prompts: Iterable[Prompt]) -> RunTools | None:
    """The tools of a run, held against its tokenizer and prompts; None without. `actor`: with its end tokens.

    Raises InputError naming file, tool or row.
    """
    settings, rollout = config.rollout.multi_turn, config.rollout
    if not settings.enable:
        return None
    check_replay(settings.replay)
    tools = ToolSet.load(settings.function_tool_path)
    own = () if rollout.ignore_eos else actor.eos_token_ids
    ends = dict.fromkeys((*own, *rollout.stop_token_ids))
    schemas, words = tool_schemas(config), config.data.chat_template_kwargs
    turns = ChatTurns(tokenizer, schemas, settings.format, [*ends], settings.max_parallel_calls, **words)
    for number, prompt in enumerate(prompts):
        if isinstance(prompt.text, str) and not config.data.apply_chat_template:
            fix = "give chat turns, or set data.apply_chat_template=true"
            raise InputError(f"{prompt.where}: a text prompt does not tell the model of its tools; {fix}")
        if not number:
            tools.try_environment(prompt.row, prompt.where)
    return RunTools(tools, turns)
