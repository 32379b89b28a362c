"""Tools of a user's file, as functions of values, so that any process may make any call, and again after a kill.

FILE.py          its public functions are tools
FILE.py:CLASS    an environment: reset(**row), public methods as tools, get_reward() where it has one

A parameter `call` is not the model's: {"sample_id", "number", "seed", "kwargs"}, of the row's tools_kwargs the tool's.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfuse.base.errors import InputError
from rlhfuse.data.reward_function import OF_STATE, RewardFunction, described, load_module

KEY = "rollout.multi_turn.function_tool_path"
OWN = "call"  # the parameter that is not the model's
RESET, REWARD = "reset", "get_reward"


@dataclass(frozen=True)
class ToolCall:
    """One call, as a process makes it."""

    sample_id: int
    number: int  # of the sample's calls
    tool: str
    arguments: Mapping[str, Any]
    seed: int  # of the run
    row: Mapping[str, Any]  # of the prompt file
    state: bytes | None = None  # of the environment; None: it is new
    source: str = ""  # `ToolSet.digest`

    @property
    def digest(self) -> str:
        """SHA-256 of all that the answer depends on, besides the sample and the call's number."""
        state = hashlib.sha256(self.state).hexdigest() if self.state is not None else None
        facts = [self.tool, self.arguments, self.seed, repr(self.row), state, self.source]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def own(self) -> dict[str, Any]:
        """What the tool may know beside its arguments; the seed is this call's."""
        word = hashlib.sha256(f"{self.seed} {self.sample_id} {self.number}".encode()).digest()
        extra = self.row.get("extra_info")
        given = self.row.get("tools_kwargs") or (extra.get("tools_kwargs") if isinstance(extra, Mapping) else None)
        kwargs = given.get(self.tool) if isinstance(given, Mapping) else None
        seed = int.from_bytes(word[:8], "little") >> 1
        return {"sample_id": self.sample_id, "number": self.number, "seed": seed, "kwargs": kwargs or {}}


@dataclass(frozen=True)
class ToolSet:
    """All tools of a run; a `Callee` of the processes that call them."""

    name: str  # as the configuration has it
    functions: Mapping[str, Callable[..., Any]]  # by name; of an environment those of its class
    environment: type | None = None
    digest: str = ""  # SHA-256 of the file
    most: int = 1 << 20  # characters of an answer that are kept, of each end

    @staticmethod
    def load(name: str, most: int = 1 << 20) -> ToolSet:
        """Import them. Raises InputError naming what is missing, or clashes."""
        source, colon, attribute = name.rpartition(":")
        if not colon:
            source, attribute = name, ""
        module = load_module(source, KEY, name)
        found = getattr(module, attribute, None) if attribute else None
        if inspect.isclass(found):
            own = (RESET, REWARD)
            tools = {n: f for n, f in inspect.getmembers(found, inspect.isfunction) if n[0] != "_" and n not in own}
        elif attribute:
            raise InputError(f"{KEY}={name}: {source} has no class {attribute}; name an environment, or the file alone")
        else:
            here = {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != "_"}
            tools = {n: f for n, f in here.items() if f.__module__ == module.__name__}
        digest = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest() if module.__file__ else ""
        loaded = ToolSet(name, tools, found, digest, most)
        loaded._check()
        return loaded

    def _check(self) -> None:
        where, seen = f"{KEY}={self.name}", {}
        if not self.functions:
            raise InputError(f"{where} has no tools: public functions of the file, or methods of the class")
        for name, function in self.functions.items():
            if not function.__name__.isidentifier():
                raise InputError(f"{where}: {name} is a lambda, which has no docstring; write it with def")
            if (other := seen.setdefault(function.__name__, name)) != name:
                raise InputError(f"{where}: {other} and {name} are both named {function.__name__}; rename one")
        kinds = {inspect.iscoroutinefunction(function): name for name, function in self.functions.items()}
        if len(kinds) > 1:
            raise InputError(
                f"{where}: {kinds[True]} is async and {kinds[False]} is not; make all of them one or other"
            )

    def instances(self) -> dict[str, Callable[..., Any]]:
        """Name -> what a model sees of a tool, its signature without self. Raises InputError."""
        if self.environment is None:
            return dict(self.functions)
        try:
            environment = self.environment()
        except Exception as error:
            where = f"{KEY}={self.name}: {self.environment.__name__}()"
            raise InputError(f"{where} raised {described(error)}; it must need no arguments") from None
        return {name: getattr(environment, name) for name in self.functions}

    def try_environment(self, row: Mapping[str, Any], where: str) -> None:
        """Raise InputError unless an environment can be made for a row and its state pickled."""
        if self.environment is None:
            return
        about = f"{KEY}={self.name}, {where}:"
        try:
            environment = self.environment()
            said = self._reset(environment, row)
        except Exception as error:
            raise InputError(f"{about} {RESET} raised {described(error)}") from None
        if said is not None:
            raise InputError(
                f"{about} {RESET} returned {said!r:.60}, not None: what a model reads stands in its prompt"
            )
        try:
            pickle.loads(pickle.dumps(environment))
        except Exception as error:
            fix = "keep in it what can be copied; open files and connections belong into the call"
            raise InputError(f"{about} its state cannot be pickled ({described(error)}); {fix}") from None

    @property
    def is_async(self) -> bool:
        return all(map(inspect.iscoroutinefunction, self.functions.values()))

    def fault(self, tool: str, arguments: Any) -> str:
        """What a model is told of a call that cannot be made; '' where it can."""
        if tool not in self.functions:
            return f"Error: there is no tool {tool[:60]!r}; there are {', '.join(self.functions)}"
        if not isinstance(arguments, Mapping) or OWN in arguments:
            return f"Error: the arguments of {tool} must be an object of its parameters"
        function = self.functions[tool]
        takes_own = {OWN: None} if OWN in inspect.signature(function).parameters else {}
        try:
            inspect.signature(function).bind(*([None] if self.environment else []), **arguments, **takes_own)
        except TypeError as error:
            return f"Error: {tool}: {error}"
        return ""

    def reward(self, state: bytes | None, row: Mapping[str, Any]) -> Any:
        """What the environment says of a sample that ended in this state."""
        return getattr(self._at(state, row), REWARD)()

    def about(self, call: ToolCall) -> str:
        """Beginning of what a model is told of a call that failed."""
        return "Error:"

    def invoke(self, call: ToolCall) -> Any:
        """(environment after the call, what the tool returned); async ones as something to await."""
        environment = self._at(call.state, call.row) if self.environment else None
        function = getattr(environment, call.tool) if environment is not None else self.functions[call.tool]
        own = {OWN: call.own} if OWN in inspect.signature(function).parameters else {}
        returned = function(**call.arguments, **own)
        return _beside(environment, returned) if self.is_async else (environment, returned)

    def result(self, returned: tuple[Any, Any], call: ToolCall) -> tuple[bytes | None, str]:
        """State and text after the call."""
        environment, said = returned
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
        if len(text) > 2 * self.most:  # of which the middle is cut out anyway, once it is counted in tokens
            text = text[: self.most] + text[-self.most :]
        return (None if environment is None else pickle.dumps(environment)), text

    def failed(self, error: BaseException, call: ToolCall) -> str:
        """What a model is told of an exception."""
        return f"{self.about(call)} {described(error)}"

    def _at(self, state: bytes | None, row: Mapping[str, Any]) -> Any:
        if state is not None:
            return pickle.loads(state)
        assert self.environment is not None, "only an environment has states"
        environment = self.environment()
        self._reset(environment, row)
        return environment

    def _reset(self, environment: Any, row: Mapping[str, Any]) -> Any:
        """Begin with a row, of which it gets the columns that it takes."""
        reset = getattr(environment, RESET, None)
        if reset is None:
            return None
        taken = inspect.signature(reset).parameters.values()
        everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        names = {parameter.name for parameter in taken}
        return reset(**{key: value for key, value in row.items() if everything or key in names})


async def _beside(environment: Any, returned: Any) -> tuple[Any, Any]:
    return environment, await returned


def environment_reward(name: str) -> RewardFunction:
    """get_reward() of the environment `name`, FILE.py:CLASS, as a function of one sample. Raises InputError."""
    tools = ToolSet.load(name)
    if not callable(getattr(tools.environment, REWARD, None)):
        raise InputError(f"reward.function={REWARD}: {KEY}={name} is no class with {REWARD}(self)")
    return RewardFunction(REWARD, OF_STATE, tools.reward)
