"""Who may import whom: reads every import and holds the table of the design page."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = {
    **dict.fromkeys(("errors", "files", "kernel_cache"), 0),
    "config": 1,
    "schedule": 2,
    **dict.fromkeys(("decisions", "costs"), 3),
    "simulator": 4,
    "planning": 5,
    **dict.fromkeys(("parallel", "models"), 6),
    **dict.fromkeys(("ppo", "data", "monitor", "gen", "checkpoint"), 7),
    "fusion": 8,
    "run": 9,
}
# Within a package: a subpackage may import those before it and its own modules; modules beside them import all.
FLOORS = {
    "schedule": ("ir", "bounds", "rules", "program", "search"),
    "gen": ("cpu", "gpu", "migration"),
    "fusion": ("intra", "inter"),
    "monitor": ("report",),
    "models": ("cpu",),
    "run": ("profiling",),
}
STRANGERS = {"ppo", "data", "monitor", "gen"}  # do not know each other
# package -> where it may be imported: folders end with "/"
RESTRICTED = {
    "mpi4py": ("rlhfuse/schedule/search/search.py",),
    "transformers": ("rlhfuse/models/hf.py", "tools/"),
    "flash_attn": ("rlhfuse/models/attention.py",),
    "wandb": ("rlhfuse/monitor/wandb_logger.py",),
    "megatron": ("rlhfuse/parallel/", "rlhfuse/models/"),
}
TORCH_FREE_LAYERS = (0, 1, 2, 3, 4, 5)


def imports(file, package):
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


def violations(root):
    """One line for every import under root/rlhfuse and root/tools that the table forbids."""
    found = []
    for file in sorted([*root.glob("rlhfuse/**/*.py"), *root.glob("tools/**/*.py")]):
        path = file.relative_to(root)
        own = path.parts[1].removesuffix(".py") if path.parts[0] == "rlhfuse" else None
        names = imports(file, list(path.parts[:-1]))
        found += [f"{path}: {line}" for name in names for line in _forbidden(str(path), own, name)]
        if file.name == "__init__.py":
            body = ast.parse(file.read_text()).body
            if len(body) != 1 or ast.get_docstring(ast.parse(file.read_text())) is None:
                found.append(f"{path}: must hold a docstring and nothing else")
        elif own is not None and own not in LAYERS:
            found.append(f"{path}: {own} has no layer in the table")
    return found


def _forbidden(path, own, name):
    parts = name.split(".")
    for package, places in RESTRICTED.items():
        if parts[0] == package and not any(path == p or (p.endswith("/") and path.startswith(p)) for p in places):
            yield f"imports {package}, allowed only in {', '.join(places)}"
    if own is None or own not in LAYERS:
        return
    if parts[0] == "torch" and LAYERS[own] in TORCH_FREE_LAYERS:
        yield "imports torch"
    if parts[0] != "rlhfuse" or len(parts) < 2 or parts[1] == own:
        return
    other = parts[1]
    if other not in LAYERS:
        yield f"imports {name}, which has no layer in the table"
    elif LAYERS[other] > LAYERS[own]:
        yield f"layer {LAYERS[own]} imports {name} of layer {LAYERS[other]}"
    elif own in STRANGERS and other in STRANGERS:
        yield f"imports {name}: {own} and {other} do not know each other"


def test_project_holds_the_table():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    "path, text, complaint",
    [
        ("rlhfuse/schedule/a.py", "import torch.nn", "imports torch"),
        (
            "rlhfuse/schedule/a.py",
            "from mpi4py import MPI",
            "mpi4py, allowed only in rlhfuse/schedule/search/search.py",
        ),
        ("rlhfuse/schedule/a.py", "from rlhfuse.costs.analytic import x", "nothing of the simulator"),
        ("rlhfuse/errors.py", "from rlhfuse import ppo", "layer 0 imports rlhfuse.ppo of layer 7"),
        ("rlhfuse/ppo/a.py", "from rlhfuse.gen.engine import Engine", "do not know each other"),
        ("rlhfuse/ppo/a.py", "def f():\n    from ..data import prompts", "do not know each other"),
        ("rlhfuse/gen/a.py", "from megatron.core import x", "imports megatron"),
        ("rlhfuse/models/build.py", "import transformers", "imports transformers"),
        ("rlhfuse/fusion/a.py", "import flash_attn", "imports flash_attn"),
        ("rlhfuse/parallel/a.py", "from rlhfuse import trainer", "layer 2 imports rlhfuse.run.trainer of layer 5"),
        ("rlhfuse/ppo/__init__.py", '"""Doc."""\nfrom rlhfuse.ppo.losses import x', "a docstring and nothing else"),
        ("rlhfuse/ppo/__init__.py", "", "a docstring and nothing else"),
        ("rlhfuse/utils.py", "x = 1", "utils has no layer"),
        ("tools/a.py", "import mpi4py", "imports mpi4py"),
    ],
)
def test_a_made_up_offence_is_found(tmp_path, path, text, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1 and complaint in found[0], found


@pytest.mark.parametrize(
    "path, text",
    [
        ("rlhfuse/schedule/search/search.py", "from mpi4py import MPI"),
        ("rlhfuse/simulator/a.py", "from rlhfuse.schedule import problem"),
        ("rlhfuse/models/hf.py", "import transformers, torch, megatron.core"),
        ("rlhfuse/gen/a.py", "from rlhfuse.models.build import x\nfrom . import sequence"),
        ("tools/a.py", "import transformers, torch\nfrom rlhfuse.run.trainer import x"),
        ("rlhfuse/ppo/__init__.py", '"""Only words."""'),
    ],
)
def test_what_the_table_allows_passes(tmp_path, path, text):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert violations(tmp_path) == []
