"""Who may import whom: reads every import and holds the table of the design page."""

import ast
import graphlib

import pytest
from testkit.imports import imports
from testkit.paths import ROOT

# Room -> floor. A room imports from lower floors, never from its own or from higher ones.
LAYERS = {
    "base": 0,
    "tasks": 1,
    **dict.fromkeys(("config", "data", "monitor", "schedule"), 2),
    **dict.fromkeys(("decisions", "ppo"), 3),
    **dict.fromkeys(("costs", "parallel"), 4),
    **dict.fromkeys(("simulator", "models"), 5),
    **dict.fromkeys(("planning", "gen"), 6),
    "fusion": 7,
    "run": 8,
}
# Within a room: what a subpackage may import of it beside itself. Modules beside subpackages import them all.
WITHIN = {
    "costs": {"forms": ("fits",)},
    "fusion": {"intra": (), "inter": ()},
    "gen": {
        "core": (),
        "cpu": ("core",),
        "gpu": ("core",),
        "speculation": ("core", "cpu"),
        "migration": ("core", "engine"),
    },
    "models": {
        "cpu": (),
        "layers": ("cpu",),
        "attention": ("cpu", "layers"),
        "logprobs": (),
        "stack": ("cpu", "layers", "attention"),
    },
    "planning": {
        "training": (),
        "memory": ("job", "training"),
        "search": tuple(  # none of a plan
            "candidate efficiency graph_capture memory price job rooflines training".split()
        ),
    },
    "run": {"checkpoint": ("run_directory",)},
    "schedule": {
        "ir": (),
        "bounds": ("ir",),
        "rules": ("ir",),
        "program": ("ir",),
        "search": ("ir", "bounds", "rules"),
    },
}
# package -> where it may be imported: folders end with "/"
RESTRICTED = {
    "mpi4py": ("rlhfuse/schedule/search/mpi.py",),
    "transformers": ("rlhfuse/models/tokenizer.py", "tools/"),
    "flash_attn": ("rlhfuse/models/attention/packed/flash_attention.py",),
    "flashinfer": ("rlhfuse/models/attention/paged/flashinfer.py",),
    "triton": (
        "rlhfuse/models/attention/paged/triton_kernels.py",
        "rlhfuse/models/layers/decode_layer_triton.py",
        "rlhfuse/models/logprobs/tile_sums_triton.py",
        "rlhfuse/models/stack/backward_kernels.py",
        "rlhfuse/models/stack/handle.py",
        "rlhfuse/gen/gpu/",
        "tools/rehearsal/launches.py",
        "tools/gpu_checks/",
    ),
    "wandb": ("rlhfuse/monitor/loggers.py",),
    "megatron": ("rlhfuse/parallel/", "rlhfuse/models/"),
}
MOST_FILES = 15
MOST_CONFIGS = 12  # parameters and fields outside of config/ and run/ that are the whole configuration
MOST_ROOMS, MOST_ARROWS, MOST_FLOORS = 19, 100, 11  # of the house: packages, tools and benchmarks; who imports whom
TORCH_FREE = set("base tasks config schedule decisions costs simulator planning".split())


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
            entry = path.parts == ("rlhfuse", "__init__.py") and isinstance(body[-1], ast.FunctionDef)  # rlhfuse.train
            parts = 3 * (path.parts == ("tools", "__init__.py"))  # where the parts of installed programs lie
            if len(body) != 1 + entry + parts or ast.get_docstring(ast.parse(file.read_text())) is None:
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
    if parts[0] == "torch" and own in TORCH_FREE:
        yield "imports torch"
    if parts[0] == "rlhfuse" and len(parts) > 2 and parts[1] == own:
        subpackage = path.split("/")[2]
        if parts[2] not in (subpackage, *WITHIN.get(own, {}).get(subpackage, (parts[2],))):
            yield f"{own}/{subpackage} imports {name}"
    if parts[0] != "rlhfuse" or len(parts) < 2 or parts[1] == own:
        return
    other = parts[1]
    if other not in LAYERS:
        yield f"imports {name}, which has no layer in the table"
    elif LAYERS[other] >= LAYERS[own]:
        yield f"layer {LAYERS[own]} imports {name} of layer {LAYERS[other]}"


def circle(root):
    """Modules under root/rlhfuse that import each other in a loop, if any: each one is imported by the next.

    Imports for type checking and inside functions count.
    """
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in root.glob("rlhfuse/**/*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph = {}
    for name, file in modules.items():
        named = imports(file, name.split(".")[:-1])
        graph[name] = {n if n in modules else n.rpartition(".")[0] for n in named} & modules.keys() - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def arrows(root):
    """By room (a package of rlhfuse, rlhfuse itself, tools or benchmarks) the other rooms that it imports."""
    places = {
        folder: {f.name.removesuffix(".py") for f in (root / folder).glob("*")} for folder in ("tools", "benchmarks")
    }
    found = {}
    for file in (file for folder in ("rlhfuse", *places) for file in root.glob(f"{folder}/**/*.py")):
        parts = file.relative_to(root).parts
        own = parts[1] if parts[0] == "rlhfuse" and len(parts) > 2 else parts[0]
        for name in (name.split(".") for name in imports(file, list(parts[:-1]))):
            there = name[1] if name[0] == "rlhfuse" and len(name) > 1 else None
            if there is None and parts[0] in places:
                there = next((room for room in ("tools", parts[0]) if name[0] in places[room]), None)
            found.setdefault(own, set()).update({there} - {None, own})
    return found


def floors(graph):
    """How many rooms stand on each other at most; a room stands above all that it imports."""
    floor = {}
    for room in graphlib.TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[other] for other in graph.get(room, ())), default=0)
    return max(floor.values())


def crowded(root):
    """One line for every folder of the package that holds more than MOST_FILES modules."""
    folders = [folder for folder in (root / "rlhfuse").rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    counts = {folder: len([f for f in folder.glob("*.py") if f.name != "__init__.py"]) for folder in folders}
    return [f"{folder.relative_to(root)}: {count} modules" for folder, count in counts.items() if count > MOST_FILES]


def untold(root):
    """One line for every module whose docstring is missing or longer than what it is, its idea and its source."""
    docs = {file: ast.get_docstring(ast.parse(file.read_text())) for file in root.glob("rlhfuse/**/*.py")}
    return [str(file.relative_to(root)) for file, doc in docs.items() if doc is None or doc.count("\n") >= 6]


def whole_configurations(root):
    """One line for every parameter and field of the package that is a RunConfig, beside those of config/ and run/."""
    found = []
    for file in sorted(root.glob("rlhfuse/**/*.py")):
        path = file.relative_to(root)
        for node in ast.walk(ast.parse(file.read_text())) if path.parts[1] not in ("config", "run") else ():
            named = {}
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                named = {a.arg: a.annotation for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                named = {ast.unparse(field.target): field.annotation for field in fields}
            whole = [name for name, hint in named.items() if hint is not None and "RunConfig" in ast.unparse(hint)]
            found += [f"{path}:{node.lineno}: {name} of {node.name}" for name in whole]
    return found


def test_few_take_the_whole_configuration(tmp_path):
    """All others take the facts that they use."""
    found = whole_configurations(ROOT)
    assert len(found) <= MOST_CONFIGS, "\n".join(found)
    text = "class A:\n    one: RunConfig\n\n    def two(self, three: RunConfig | None, *, four: int): ..."
    for room in ("planning", "run"):
        (tmp_path / "rlhfuse" / room).mkdir(parents=True)
        (tmp_path / "rlhfuse" / room / "a.py").write_text(text)
    names = [line.split(": ")[1] for line in whole_configurations(tmp_path)]
    assert names == ["one of A", "three of two"]


def test_project_holds_the_table():
    assert violations(ROOT) == []


def test_no_modules_import_each_other_in_a_loop():
    assert circle(ROOT) == []


def test_the_house_has_no_more_rooms_arrows_and_floors_than_it_may():
    house = arrows(ROOT)
    assert "config" in house["planning"] and "tools" in house["benchmarks"]
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == 3
    assert len(house) <= MOST_ROOMS and sum(map(len, house.values())) <= MOST_ARROWS and floors(house) <= MOST_FLOORS


def test_no_room_is_crowded_and_the_root_holds_none():
    assert crowded(ROOT) == []
    assert [file.name for file in (ROOT / "rlhfuse").glob("*.py")] == ["__init__.py"]


def test_module_docstrings_have_at_most_six_lines(tmp_path):
    assert untold(ROOT) == []
    folder = tmp_path / "rlhfuse"
    folder.mkdir()
    for name, lines in (("six", 6), ("seven", 7)):
        (folder / f"{name}.py").write_text(f'"""{"x" + chr(10) * (lines - 1)}x"""')
    (folder / "none.py").write_text("x = 1")
    assert sorted(untold(tmp_path)) == ["rlhfuse/none.py", "rlhfuse/seven.py"]


@pytest.mark.parametrize(
    "path, text, complaint",
    [
        ("rlhfuse/schedule/a.py", "import torch.nn", "imports torch"),
        ("rlhfuse/planning/a.py", "import torch.nn", "imports torch"),
        ("rlhfuse/schedule/a.py", "from mpi4py import MPI", "mpi4py, allowed only in rlhfuse/schedule/search/"),
        ("rlhfuse/schedule/search/a.py", "from rlhfuse.costs.analytic import x", "layer 2 imports rlhfuse.costs"),
        ("rlhfuse/schedule/ir/a.py", "from rlhfuse.schedule.bounds import x", "schedule/ir imports rlhfuse.schedule.b"),
        ("rlhfuse/gen/core/a.py", "from rlhfuse.gen.engine import Engine", "gen/core imports rlhfuse.gen.engine"),
        ("rlhfuse/base/errors.py", "from rlhfuse import ppo", "layer 0 imports rlhfuse.ppo of layer 3"),
        ("rlhfuse/ppo/a.py", "from rlhfuse.gen.engine import Engine", "layer 3 imports rlhfuse.gen.engine"),
        ("rlhfuse/ppo/a.py", "def f():\n    from ..run import x", "layer 3 imports rlhfuse.run"),
        ("rlhfuse/gen/a.py", "from megatron.core import x", "imports megatron"),
        ("rlhfuse/models/build.py", "import transformers", "imports transformers"),
        ("rlhfuse/fusion/a.py", "import flash_attn", "imports flash_attn"),
        ("rlhfuse/parallel/a.py", "from rlhfuse import run", "layer 4 imports rlhfuse.run of layer 8"),
        ("rlhfuse/ppo/__init__.py", '"""Doc."""\nfrom rlhfuse.ppo.losses import x', "a docstring and nothing else"),
        ("rlhfuse/ppo/__init__.py", "", "a docstring and nothing else"),
        ("rlhfuse/utils.py", "x = 1", "utils has no layer"),
        ("tools/a.py", "import mpi4py", "imports mpi4py"),
        ("rlhfuse/schedule/search/mpi.py", "from mpi4py import MPI", None),
        ("rlhfuse/simulator/a.py", "from rlhfuse.schedule.ir import problem", None),
        ("rlhfuse/models/tokenizer.py", "import transformers, torch, megatron.core", None),
        ("rlhfuse/gen/a.py", "from rlhfuse.models.build import x\nfrom . import sequence", None),
        ("tools/a.py", "import transformers, torch\nfrom rlhfuse.run.trainer import x", None),
        ("rlhfuse/ppo/__init__.py", '"""Only words."""', None),
    ],
)
def test_made_up_offences_are_found_and_what_the_table_allows_passes(tmp_path, path, text, complaint):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    found = violations(tmp_path)
    assert len(found) == (complaint is not None) and all(complaint in line for line in found), found


def test_a_loop_for_type_checking_is_found(tmp_path):
    folder = tmp_path / "rlhfuse/gen"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text('"""Only words."""')
    (folder / "a.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from rlhfuse.gen.b import B")
    (folder / "b.py").write_text("def f():\n    from rlhfuse.gen import c")
    (folder / "c.py").write_text("import rlhfuse.gen.a")
    (folder / "d.py").write_text("import rlhfuse.gen.a")
    found = circle(tmp_path)
    assert len(found) == 4 and set(found) == {"rlhfuse.gen.a", "rlhfuse.gen.b", "rlhfuse.gen.c"}


def test_no_two_test_files_share_a_name():
    """pytest imports them by their names alone: a second one of a name is an error."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
