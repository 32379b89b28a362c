"""What a Python file of this checkout reaches: its imports, and files that it names."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path

from rlhfuse.base.errors import InputError
from rlhfuse.tools.program import run_program
from testkit.paths import ROOT, TESTS

# what every test has by its fixtures: a change there reaches all of them, and nobody is followed through it
SHARED = (
    "setup.cfg",
    "pyproject.toml",
    "tests/conftest.py",
    *(f"tests/testkit/{name}.py" for name in ("plugin", "programs", "workers", "paths", "profiles")),
)
SOURCES = ("", "tests", "tools", "benchmarks", "examples/make", "docs/make")  # on the path of a test
IMPORTED = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
STARTS = {"tool": "", "call_tool": "", "train": "train_ppo", "trained": "train_ppo"}  # which tool a call starts


def imports(file: Path, package: list[str]) -> list[str]:
    """Dotted names that a file imports anywhere in it, inside functions too; relative ones made absolute.

    `package`: the file's package as a list of names. `from a import b` counts as a.b, which may be a module.
    """
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            found += [f"{module}.{alias.name}" for alias in node.names]
    return found


def reaching(changed: Iterable[str], tests: Iterable[str]) -> list[str]:
    """Those of `tests` that a change of the files can reach; paths are relative to the checkout.

    A Python file reaches what it imports, in code that stands in it as text too, the tools and programs that it names,
    and so on; any other file is reached by a test that names it or its folder. A change of what all tests share reaches
    all, and so does code that is gone: nobody can be followed to it.
    """
    changed = {path for path in changed if _exists(path) or not path.startswith("tests/test_") and "/test_" not in path}
    code = {path for path in changed if path.endswith(".py")}
    if changed & {*SHARED} or not all(map(_exists, code)):
        return list(tests)
    others = changed - code
    found = []
    for test in tests:
        files = _closure(test)
        named = frozenset().union(*(_texts(file) for file in files))
        if files & code or any(_names(path, named) for path in others):
            found.append(test)
    return found


def _names(path: str, texts: frozenset[str]) -> bool:
    """Whether one of the texts is the path, the end of it, or a folder that it lies in."""
    parts = path.split("/")
    ends = {"/".join(parts[start:]) for start in range(len(parts))}
    folders = {"/".join(parts[:stop]) for stop in range(1, len(parts))}
    return bool(texts & (ends | folders))


@cache
def _closure(start: str) -> frozenset[str]:
    seen, open_ = {start}, [start]
    while open_:
        new = _reached(open_.pop()) - seen
        seen |= new
        open_ += new
    return frozenset(seen)


@cache
def _reached(path: str) -> frozenset[str]:
    if path in SHARED:
        return frozenset()
    file = ROOT / path
    programs = [text.removesuffix(".py").replace("/", ".") for text in _texts(path) if text.endswith(".py")]
    of_tests = path.startswith("tests/")
    names = [*imports(file, list(Path(path).parts[:-1])), *programs]
    if of_tests:
        code = (IMPORTED.findall(text) for text in _strings(path))
        names += [*_started(path), *chain.from_iterable(code)]
    found = {module for name in names for module in _modules(name)}
    if of_tests:
        above = (str((folder / "conftest.py").relative_to(ROOT)) for folder in file.parents if ROOT in folder.parents)
        found |= {one for one in above if _exists(one)}
    return frozenset(found)


def _started(path: str) -> Iterator[str]:
    """Tools that calls of the test start: `call_tool("plan", ...)`, `programs.tool("plan")`, `programs.train(...)`."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            given = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
            name = STARTS.get(called)
            if name is not None and (name or given):
                yield f"tools.{name or given[0]}"


def _modules(name: str) -> Iterator[str]:
    """The file of a dotted name's longest part that is a module: packages above it hold a docstring."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return
    for source in SOURCES:
        inner = ["/".join([*([source] if source else []), *parts[:stop]]) for stop in range(len(parts), 0, -1)]
        files = (path for one in inner for path in (f"{one}.py", f"{one}/__init__.py") if _exists(path))
        yield from islice(files, 1)


@cache
def _exists(path: str) -> bool:
    return (ROOT / path).is_file()


@cache
def _texts(path: str) -> frozenset[str]:
    """Short texts that stand in the file: they may name other files."""
    return frozenset(text for text in _strings(path) if 0 < len(text) < 120 and " " not in text)


@cache
def _strings(path: str) -> frozenset[str]:
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    return frozenset(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def changed_files(since: str) -> list[str]:
    """Files that differ from commit `since`, uncommitted and untracked ones too. Raises InputError."""
    found = []
    for words in (("diff", "--name-only", "--no-renames", since, "--"), ("ls-files", "--others", "--exclude-standard")):
        said = subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True)
        if said.returncode:
            raise InputError(f"git knows no commit {since!r}: {said.stderr.strip().splitlines()[0]}")
        found += said.stdout.splitlines()
    return found


def main() -> int:
    """Print the files of tests that a change since a commit can reach, one a line; what they are goes to stderr."""
    since = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    changed = changed_files(since)
    tests = sorted(str(file.relative_to(ROOT)) for file in TESTS.rglob("test_*.py"))
    found = reaching(changed, tests)
    told = f"{len(changed)} files differ from {since}; {len(found)} of {len(tests)} test files reach them"
    print(told, file=sys.stderr)
    print("\n".join(found))
    return 0


if __name__ == "__main__":
    run_program(main)
