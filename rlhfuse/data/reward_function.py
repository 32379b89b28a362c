"""A reward function that the user names, module:function or FILE.py:function, and how it is called.

    verl   function(data_source, solution_str, ground_truth, extra_info) -> number, or {"score": number, ...}
    trl    function(prompts, completions, completion_ids, **columns) -> [number, ...]

A verl call is about one sample, a trl call about all samples of one prompt: never about what was finished together.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhfuse.base.errors import InputError, RewardError
from rlhfuse.data.prompts import text_of

# Parameters by which a function's signature is known; others may be names of a trl row's columns.
OWN_PARAMETERS = {"verl": {"solution_str"}, "trl": {"prompts", "completions", "completion_ids"}}
FILE_MODULE = "reward_function_"  # and the file's stem: what a file is imported as where another module has its name
OF_STATE = "state"  # the signature of an environment's get_reward, which no setting names: (state, row) -> number
TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)  # that have a length all the same
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ReachedTrain(BaseException):
    """A file that is imported for its reward function has come to its own start of the run: what is above is there."""


@dataclass(frozen=True)
class RewardCall:
    """What one call is about: samples of a prompt, its row of the prompt file, and what was generated."""

    sample_ids: tuple[int, ...]
    row: Mapping[str, Any]
    prompt: str | list[dict[str, str]]  # text, or chat turns
    completions: tuple[str, ...]  # one a sample, as the next
    completion_ids: tuple[tuple[int, ...], ...]
    where: str = ""  # file:line of the row, for messages
    turns: tuple[Sequence[Mapping[str, Any]], ...] = ()  # chat turns of each completion, where it may have several
    state: bytes | None = None  # of the environment in which the sample ended

    def about(self, name: str, samples: Sequence[int] = ()) -> str:
        """Beginning of a message about the function `name` and `samples` of the call, by default all of them."""
        first, *others = samples or self.sample_ids
        told = f"samples {first} to {others[-1]}" if others else f"sample {first}"
        return f"reward function {name}, {told}{f' of {self.where}' if self.where else ''}:"


@dataclass(frozen=True)
class RewardFunction:
    """The function itself, under the name that the configuration calls it by."""

    name: str
    signature: str  # verl, trl or OF_STATE
    function: Callable[..., Any]

    @staticmethod
    def load(name: str, signature: str) -> RewardFunction:
        """Import it; `signature` may be auto. Raises InputError naming what is missing, or what its module raised."""
        source, colon, attribute = name.rpartition(":")
        if not colon or not source or not attribute:
            raise InputError(f"reward.function={name} is not of the form module:function or FILE.py:function")
        module = load_module(source, "reward.function", name)
        function = getattr(module, attribute, None)
        if not callable(function):
            raise InputError(f"reward.function={name}: {source} has no function {attribute}")
        return RewardFunction(name, _signature_of(function, name) if signature == "auto" else signature, function)

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))

    def scores(self, call: RewardCall) -> dict[int, float | None]:
        """Call it; as `result`."""
        return self.result(self.function(**self.arguments(call)), call)

    async def awaited(self, call: RewardCall) -> dict[int, float | None]:
        """The same of an async function."""
        return self.result(await self.function(**self.arguments(call)), call)

    def check(self, row: Mapping[str, Any], prompt: str | list[dict[str, str]], where: str) -> None:
        """Raise InputError unless the row has what the signature needs and the function takes it; no call is made."""
        missing = [key for key in ("data_source", "reward_model") if self.signature == "verl" and row.get(key) is None]
        if missing:
            raise InputError(
                f"{where}: no key {missing[0]!r}, which reward.signature=verl needs ({{data_source, prompt, "
                "reward_model: {ground_truth}}}); add it, or use a trl function"
            )
        reward_model = row.get("reward_model")
        if self.signature == "verl" and not (isinstance(reward_model, Mapping) and "ground_truth" in reward_model):
            raise InputError(f"{where}: reward_model is {str(reward_model)[:40]!r}; it needs a ground_truth")
        if self.signature == "trl" and (taken := sorted(OWN_PARAMETERS["trl"] & row.keys())):
            raise InputError(f"{where}: the column {taken[0]!r} is named as what every trl function gets; rename it")
        try:
            arguments = self.arguments(RewardCall((0,), row, prompt, ("",), ((),)))
            inspect.signature(self.function).bind(**arguments)
        except (TypeError, ValueError) as error:
            offered = ["prompts", "completions", "completion_ids", *row]
            if self.signature == "verl":
                offered = ["data_source", "solution_str", "ground_truth", "extra_info"]
            raise InputError(
                f"reward.function={self.name} cannot be called as reward.signature={self.signature} says ({error}); "
                f"{where} offers {', '.join(offered)}"
            ) from None

    def arguments(self, call: RewardCall) -> dict[str, Any]:
        """Keyword arguments of the call; of a trl row's columns those that the function takes."""
        if self.signature == OF_STATE:
            return {"state": call.state, "row": call.row}
        if self.signature == "verl":
            return {
                "data_source": call.row["data_source"],
                "solution_str": call.completions[0],
                "ground_truth": call.row["reward_model"]["ground_truth"],
                "extra_info": call.row.get("extra_info") or {},
            }
        texts, prompt = list[Any](call.completions), call.prompt
        if call.turns:
            texts = [list(turns) for turns in call.turns]
        elif not isinstance(prompt, str):
            prompt, begun = (prompt[:-1], prompt[-1:]) if prompt[-1]["role"] == "assistant" else (prompt, [])
            start = "".join(map(text_of, begun))  # TRL gives the turn whole that responses go on with
            texts = [[{"role": "assistant", "content": start + text}] for text in texts]
        offered = {key: [value] * len(texts) for key, value in call.row.items()} | {
            "prompts": [prompt] * len(texts),
            "completions": texts,
            "completion_ids": [list(ids) for ids in call.completion_ids],
        }
        taken = inspect.signature(self.function).parameters.values()
        named = {parameter.name for parameter in taken if parameter.kind is not parameter.VAR_KEYWORD}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            named |= offered.keys() - ({"prompt"} if call.row.get("prompt") == call.prompt else set())  # of `prompts`
        return {key: value for key, value in offered.items() if key in named}

    def result(self, returned: Any, call: RewardCall) -> dict[int, float | None]:
        """Sample id -> score, or the None that it gave. Raises RewardError naming function, sample and row."""
        samples = call.sample_ids
        if self.signature == "trl":
            if (
                isinstance(returned, NO_LISTS)
                or not hasattr(returned, "__len__")
                or getattr(returned, "shape", 1) == ()
            ):
                raise RewardError(f"{call.about(self.name)} returned {returned!r:.60}, not a list of numbers")
            if len(returned) != len(samples):
                raise RewardError(
                    f"{call.about(self.name)} returned {len(returned)} numbers for {len(samples)} samples"
                )
            values = list(returned)
        else:
            values = [returned["score"] if isinstance(returned, Mapping) and "score" in returned else returned]
        return {s: None if value is None else self._number(value, call, s) for s, value in zip(samples, values)}

    def _number(self, value: Any, call: RewardCall, sample: int) -> float:
        """The number that `value` is, an array's or tensor's without dimensions too; no text is one."""
        try:
            number = value.item() if getattr(value, "shape", None) == () else value
            is_number = hasattr(number, "__float__") and not getattr(number, "shape", ())
            score = float(number if is_number else "none")
        except (TypeError, ValueError, OverflowError):
            raise RewardError(f"{call.about(self.name, [sample])} returned {value!r:.60}, not a number") from None
        if not math.isfinite(score):
            raise RewardError(f"{call.about(self.name, [sample])} returned {score}; a score must be finite")
        return score

    def failed(self, error: BaseException, call: RewardCall) -> str:
        """A message about an exception that it raised, with the line of the function's file that did."""
        if isinstance(error, RewardError):  # of `result`
            return str(error)
        return f"{call.about(self.name)} raised {described(error)}{self._line_of(error)}"

    def _line_of(self, error: BaseException) -> str:
        """The innermost line of the function's own file that `error` came through."""
        target = inspect.unwrap(self.function)
        code = getattr(target, "__code__", None) or getattr(type(target).__call__, "__code__", None)
        own = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
        return f", at {own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def _signature_of(function: Callable[..., Any], name: str) -> str:
    """verl or trl, by the parameters that are the one's alone. Raises InputError where they don't tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        parameters = ()
    named = {parameter.name for parameter in parameters if parameter.kind in NAMED}
    fitting = [signature for signature, own in OWN_PARAMETERS.items() if named & own]
    if len(fitting) == 1:
        return fitting[0]
    told = " and ".join(f"{', '.join(sorted(own))} ({signature})" for signature, own in OWN_PARAMETERS.items())
    takes = f"takes {'both of' if fitting else 'none of'} {told}"
    raise InputError(f"reward.function={name} {takes}: set reward.signature=verl or reward.signature=trl")


def name_of(function: Any) -> str:
    """The name by which another process finds `function`: module:function, or FILE.py:function where a script has it.

    Raises InputError for a function that only this process has.
    """
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    fix = "write it into a file, say my_reward.py, and give reward='my_reward.py:NAME' or import it from there"
    if not name.isidentifier() or module is None or getattr(module, name, None) is not function:
        what = "a lambda" if name.endswith("<lambda>") else name or repr(function)[:80]
        raise InputError(f"reward={what} is no function of a module's top level, so no other process finds it; {fix}")
    if module.__spec__ is not None:
        return f"{module.__spec__.name}:{name}"  # of __main__ too, where python -m started it
    if not (file := getattr(module, "__file__", None)) or not Path(file).is_file():
        raise InputError(f"reward={name} was defined at a prompt or in a notebook: no other process finds it; {fix}")
    return f"{Path(file).resolve()}:{name}"


def raise_in_reward_file() -> None:
    """Raise ReachedTrain where the caller is called by a file that is imported for its reward function."""
    frame = sys._getframe(1)
    while frame := frame.f_back:
        if frame.f_code is _from_file.__code__:
            raise ReachedTrain


def load_module(source: str, key: str, name: str) -> ModuleType:
    """Import the module or FILE.py `source` that KEY=NAME names; no signal or timer is changed. Raises InputError."""
    timers = {timer: signal.getitimer(timer) for timer in TIMERS}
    handled = signal.valid_signals() - {signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}
    handlers = {number: signal.getsignal(number) for number in handled}
    try:
        return _from_file(Path(source), key) if source.endswith(".py") else importlib.import_module(source)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        missing = isinstance(error, ModuleNotFoundError)
        fix = "; install it, or name a file as FILE.py:NAME, which finds modules beside it" if missing else ""
        raise InputError(f"{key}={name}: {source} cannot be imported ({described(error)}){fix}") from None
    finally:
        for timer, before in timers.items():
            signal.setitimer(timer, *before)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _from_file(path: Path, key: str) -> ModuleType:
    """The module of a file, one however its path is written; it may import what lies beside it, after all others."""
    if not path.is_file():
        raise InputError(f"{key}: file {path} does not exist")
    file = path.resolve()
    for name, module in [*sys.modules.items()]:
        known = str(getattr(module, "__dict__", {}).get("__file__"))
        if known.endswith(file.name) and not name.startswith("__") and Path(known).resolve() == file:
            return module
    sys.path += [at for at in dict.fromkeys(map(str, (path.absolute().parent, file.parent))) if at not in sys.path]
    importlib.invalidate_caches()  # it may be just written
    name, found = file.stem, PathFinder.find_spec(file.stem)
    if not found or Path(str(found.origin)).resolve() != file:
        name = f"{FILE_MODULE}{name}"
    while name in sys.modules:
        name += "_"
    loader = SourceFileLoader(name, str(file))  # whatever its name ends with: it may have been reached by a link
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    module = importlib.util.module_from_spec(spec)  # pyright: ignore[reportArgumentType]  # it is one: its loader is given
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with suppress(ReachedTrain):
            loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def described(error: BaseException) -> str:
    """Its type and what it says, in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
