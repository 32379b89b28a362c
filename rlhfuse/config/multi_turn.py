"""Settings of samples that call tools: whose, how a model writes calls, how many, and what becomes of failures."""

from __future__ import annotations

from typing import Literal

from rlhfuse.config.settings_group import Settings, key
from rlhfuse.config.values import PathText, Positive, Processes, Truth, Wait


class MultiTurnConfig(Settings):
    enable: Truth = key(
        False, "an answer that calls tools ends a turn: what they say is put behind it, and the sample goes on"
    )
    function_tool_path: PathText = key(
        "",
        "FILE.py, whose public functions are tools: typed, with a docstring that has an Args section; or "
        "FILE.py:CLASS, an environment: reset(**row), public methods as tools, get_reward() where it has one",
    )
    format: Literal["hermes", "qwen3_coder", "llama3_json"] = key(
        "hermes", "how calls are written, where the tokenizer has no response_template of its own, which says it"
    )
    max_assistant_turns: Positive = key(8, "the last turn that a sample may have; calls in it are not made")
    max_parallel_calls: Positive = key(1, "calls of a turn that are answered, its first ones")
    max_tool_response_length: Positive = key(256, "tokens of an answer, with the mark of a cut; a longer one is cut")
    tool_response_truncate_side: Literal["left", "middle", "right"] = key(
        "middle", "what is kept of a longer one: its left part, its right part, or both ends (middle)"
    )
    on_tool_failure: Literal["observe", "fail"] = key(
        "observe",
        "a tool that raises or is late: observe: the model is told; fail: the sample ends and counts nowhere, nor in "
        "the mean of its group",
    )
    replay: PathText = key("", "folder of a run, whose journal (tool_calls.*.jsonl) answers the calls that it has")
    timeout_seconds: Wait = key(60.0, "a call that takes longer has failed")
    workers: Processes = key(2, "processes per generation instance that call tools")
