"""A reward function that the user names, module:function or FILE.py:function, and how it is called.

    verl   function(data_source, solution_str, ground_truth, extra_info) -> number, or {"score": number, ...}
    trl    function(prompts, completions, completion_ids, **columns) -> [number]      lists of one sample

One call is about one sample, so that its number cannot depend on which samples were finished together.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfuse.base.errors import InputError, RewardError

# Parameters by which a function's signature is known; others may be names of a trl row's columns.
OWN_PARAMETERS = {"verl": {"solution_str"}, "trl": {"prompts", "completions", "completion_ids"}}
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class RewardCall:
    """One sample to be scored: its row of the prompt file, and what was generated."""

    sample_id: int
    row: Mapping[str, Any]
    prompt: str | list[dict[str, str]]  # text, or chat turns
    completion: str
    completion_ids: tuple[int, ...]
    where: str = ""  # file:line of the row, for messages


@dataclass(frozen=True)
class RewardFunction:
    """The function itself, under the name that the configuration calls it by."""

    name: str
    signature: str  # verl or trl
    function: Callable[..., Any]

    @staticmethod
    def load(name: str, signature: str) -> RewardFunction:
        """Import it; `signature` may be auto. Raises InputError naming what is missing, or what its module raised."""
        source, colon, attribute = name.rpartition(":")
        if not colon or not source or not attribute:
            raise InputError(f"reward.function={name} is not of the form module:function or FILE.py:function")
        try:
            module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
            raise InputError(f"reward.function={name}: {source} cannot be imported ({_describe(error)})") from None
        function = getattr(module, attribute, None)
        if not callable(function):
            raise InputError(f"reward.function={name}: {source} has no function {attribute}")
        return RewardFunction(name, _signature_of(function, name) if signature == "auto" else signature, function)

    @property
    def is_async(self) -> bool:
        call = type(self.function).__call__ if callable(self.function) else None
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def check(self, row: Mapping[str, Any], prompt: str | list[dict[str, str]], where: str) -> None:
        """Raise InputError unless the row has what the signature needs and the function takes it; no call is made."""
        missing = [key for key in ("data_source", "reward_model") if self.signature == "verl" and key not in row]
        if missing:
            raise InputError(
                f"{where}: no key {missing[0]!r}, which reward.signature=verl needs ({{data_source, prompt, "
                "reward_model: {ground_truth}}}); add it, or use a trl function"
            )
        reward_model = row.get("reward_model")
        if self.signature == "verl" and not (isinstance(reward_model, Mapping) and "ground_truth" in reward_model):
            raise InputError(f"{where}: reward_model is {str(reward_model)[:40]!r}; it needs a ground_truth")
        try:
            arguments = self.arguments(RewardCall(0, row, prompt, "", ()))
            inspect.signature(self.function).bind(**arguments)
        except (TypeError, ValueError) as error:
            offered = ["prompts", "completions", "completion_ids", *filter(str.isidentifier, row)]
            if self.signature == "verl":
                offered = ["data_source", "solution_str", "ground_truth", "extra_info"]
            raise InputError(
                f"reward.function={self.name} cannot be called as reward.signature={self.signature} says ({error}); "
                f"{where} offers {', '.join(offered)}"
            ) from None

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """Keyword arguments of the call; of a trl row's columns those that the function takes."""
        if self.signature == "verl":
            return {
                "data_source": call.row["data_source"],
                "solution_str": call.completion,
                "ground_truth": call.row["reward_model"]["ground_truth"],
                "extra_info": call.row.get("extra_info"),
            }
        chat = not isinstance(call.prompt, str)
        completion = [{"role": "assistant", "content": call.completion}] if chat else call.completion
        offered = {key: [value] for key, value in call.row.items() if key.isidentifier()} | {
            "prompts": [call.prompt],
            "completions": [completion],
            "completion_ids": [list(call.completion_ids)],
        }
        taken = inspect.signature(self.function).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            return offered
        return {parameter.name: offered[parameter.name] for parameter in taken if parameter.name in offered}

    def number(self, returned: Any, call: RewardCall) -> float:
        """The score in what a call gave back. Raises RewardError naming function, sample and row."""
        about = about_sample(self.name, call)
        if self.signature == "trl":
            if not hasattr(returned, "__len__") or isinstance(returned, (str, Mapping)):
                raise RewardError(f"{about} returned {_short(returned)}, not a list of one number")
            if len(returned) != 1:
                raise RewardError(f"{about} returned {len(returned)} numbers for one sample")
            value: Any = returned[0]
        else:
            value = returned.get("score") if isinstance(returned, Mapping) else returned
        try:
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(f"{about} returned {_short(returned)}, not a number") from None
        if not math.isfinite(score):
            raise RewardError(f"{about} returned {score}; a score must be finite")
        return score

    def failed(self, error: BaseException, call: RewardCall) -> str:
        """A message about an exception that it raised."""
        return f"{about_sample(self.name, call)} raised {_describe(error)}"


def about_sample(name: str, call: RewardCall) -> str:
    """Beginning of a message about the function `name` and one of its samples."""
    row = f" of {call.where}" if call.where else ""
    return f"reward function {name}, sample {call.sample_id}{row}:"


def _signature_of(function: Callable[..., Any], name: str) -> str:
    """verl or trl, by the parameters that are the one's alone. Raises InputError where they don't tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        parameters = ()
    named = {parameter.name for parameter in parameters if parameter.kind in NAMED}
    found = [signature for signature, own in OWN_PARAMETERS.items() if named & own]
    if len(found) == 1:
        return found[0]
    told = " and ".join(f"{', '.join(sorted(own))} ({signature})" for signature, own in OWN_PARAMETERS.items())
    takes = f"takes {'both of' if found else 'none of'} {told}"
    raise InputError(f"reward.function={name} {takes}: set reward.signature=verl or reward.signature=trl")


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise InputError(f"reward.function: file {file} does not exist")
    name = f"reward_function_{file.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _short(value: Any) -> str:
    return repr(value)[:60]
