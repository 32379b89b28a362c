"""Tools of a user's file: found, held against what a model asks for, and called as functions of values."""

import pickle
from types import SimpleNamespace

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.data.tool_set import ToolCall, ToolSet
from rlhfuse.models.tokenizer import tool_schema

FUNCTIONS = '''
from json import dumps

def add(a: int, b: int = 1) -> int:
    """
    Adds.

    Args:
        a: one number
        b: another
    """
    return a + b

def whose(word: str, call: dict) -> dict:
    """
    Tells whose call it is.

    Args:
        word: anything
        call: not the model's
    """
    return call | {"word": word}

def bare(a):
    return a

def undocumented(a: int) -> int:
    return a

def _hidden(a: int) -> int:
    return a
'''
ENVIRONMENT = '''
class Counter:
    def reset(self, start, **others):
        self.total = start

    def add(self, n: int) -> str:
        """
        Counts.

        Args:
            n: how many more
        """
        if n < 0:
            self.total = None
            raise ValueError("below 0")
        self.total += n
        return f"now {self.total}"

    def get_reward(self):
        return float(self.total)

class Open:
    def __init__(self):
        self.handle = (i for i in ())

    def look(self) -> str:
        """Looks."""
        return ""

class Speaks(Open):
    def __init__(self):
        pass

    def reset(self):
        return "hello"

class Needs:
    def __init__(self, what):
        pass

    def look(self) -> str:
        """Looks."""

class Empty:
    pass
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    texts = {
        "mine": FUNCTIONS,
        "world": ENVIRONMENT,
        "twice": FUNCTIONS + "\nplus = add\n",
        "short": "double = lambda a: 2 * a\n",
        "mixed": FUNCTIONS + "\nasync def wait(a: int) -> int:\n    return a\n",
        "empty": "from json import dumps\n",
        "broken": "import nothing_of_this_name\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    return SimpleNamespace(**{name: str(folder / f"{name}.py") for name in texts})


def call(tool, state=None, number=3, row=None, **arguments):
    return ToolCall(17, number, tool, arguments, 5, row or {}, state)


def made(tools, one):
    return tools.result(tools.invoke(one), one)


def test_public_functions_of_the_file_are_tools(files):
    tools = ToolSet.load(files.mine)
    assert list(tools.functions) == ["add", "whose", "bare", "undocumented"] and not tools.is_async
    assert made(tools, call("add", a=4)) == (None, "5")
    told = made(tools, call("whose", word="ü", row={"tools_kwargs": {"whose": {"truth": 7}}}))[1]
    assert '"sample_id": 17, "number": 3' in told and '"kwargs": {"truth": 7}, "word": "ü"' in told
    seeds = {call("whose", number=n).own["seed"] for n in range(9)}
    assert len(seeds) == 9 and seeds == {call("add", number=n).own["seed"] for n in range(9)}
    nested = call("whose", row={"extra_info": {"tools_kwargs": {"whose": {"truth": 8}}}})
    assert nested.own["kwargs"] == {"truth": 8} and call("add").own["kwargs"] == {}


def test_a_schema_has_what_the_model_gives(files):
    tools = ToolSet.load(files.mine).instances()
    schema = tool_schema(tools["whose"], "call", "here")["function"]["parameters"]
    assert list(schema["properties"]) == schema["required"] == ["word"]
    for name in ("bare", "undocumented"):
        with pytest.raises(InputError, match=r"^here, tool \w+: .*give every parameter a type and a line"):
            tool_schema(tools[name], "call", f"here, tool {name}")
    methods = ToolSet.load(f"{files.world}:Counter").instances()
    assert tool_schema(methods["add"], "call", "here")["function"]["parameters"]["required"] == ["n"]


@pytest.mark.parametrize(
    "tool, arguments, told",
    [
        ("add", {"a": 1}, ""),
        ("whose", {"word": "x"}, ""),
        ("sub", {"a": 1}, "there is no tool 'sub'; there are add, whose"),
        ("add", {}, "add: missing a required argument: 'a'"),
        ("add", {"a": 1, "c": 2}, "add: got an unexpected keyword argument 'c'"),
        ("add", [1], "the arguments of add must be an object"),
        ("whose", {"word": "x", "call": {}}, "the arguments of whose must be an object"),
    ],
)
def test_what_cannot_be_called_is_told(files, tool, arguments, told):
    assert ToolSet.load(files.mine).fault(tool, arguments).removeprefix("Error: ").startswith(told) or told == ""
    assert bool(ToolSet.load(files.mine).fault(tool, arguments)) == bool(told)


def test_an_environment_is_a_value(files):
    """A call changes nothing but what it gives back: what failed, or was made twice, left no trace."""
    tools = ToolSet.load(f"{files.world}:Counter")
    row = {"start": 10, "other": 1}
    tools.try_environment(row, "p.jsonl:1")
    assert list(tools.functions) == ["add"] and not tools.fault("add", {"n": 1})
    first, text = made(tools, call("add", row=row, n=2))
    assert text == "now 12" and made(tools, call("add", row=row, n=2)) == (first, text)
    failing = call("add", first, row=row, n=-1)
    with pytest.raises(ValueError) as caught:
        tools.invoke(failing)
    assert tools.failed(caught.value, failing) == "Error: ValueError: below 0"
    assert made(tools, call("add", first, row=row, n=3))[1] == "now 15"
    assert tools.reward(first, row) == 12.0 and tools.reward(None, row) == 10.0
    assert pickle.loads(first).total == 12


@pytest.mark.parametrize(
    "name, message",
    [
        ("{folder}/nowhere.py", "file .*nowhere.py does not exist"),
        ("{broken}", r"broken.py cannot be imported \(ModuleNotFoundError"),
        ("{mine}:Nothing", "has no class Nothing; name an environment, or the file alone"),
        ("{mine}:add", "has no class add"),
        ("{twice}", "add and plus are both named add; rename one"),
        ("{short}", "double is a lambda"),
        ("{mixed}", "wait is async and .* is not"),
        ("{empty}", "has no tools"),
        ("{world}:Empty", "has no tools"),
    ],
)
def test_files_that_cannot_be_used(files, name, message):
    with pytest.raises(InputError, match=message) as caught:
        ToolSet.load(name.format(folder="/nowhere", **vars(files)))
    assert str(caught.value).startswith("rollout.multi_turn.function_tool_path") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, message",
    [
        ("Open", "its state cannot be pickled .*open files and connections belong into the call"),
        ("Speaks", "reset returned 'hello', not None"),
        ("Counter", "reset raised TypeError"),
    ],
)
def test_environments_that_cannot_be_used(files, name, message):
    with pytest.raises(InputError, match=message):
        ToolSet.load(f"{files.world}:{name}").try_environment({}, "p.jsonl:1")
    with pytest.raises(InputError, match=r"Needs\(\) raised TypeError.*; it must need no arguments"):
        ToolSet.load(f"{files.world}:Needs").instances()
