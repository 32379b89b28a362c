"""The built package: what it says of itself, that it resolves beside each torch, and that it works where it is alone.

`wheels/` holds the metadata of public wheels as far as it is about dependencies.
"""

import configparser
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from testkit.paths import ROOT

WHEELS = Path(__file__).with_name("wheels")
TORCH = [file.stem for file in sorted(WHEELS.glob("torch-*.txt"))]
PROGRAMS = ("train", "plan", "search", "calibrate", "report", "check", "compare")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
NO_CONFIG = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {
    "PIP_CONFIG_FILE": os.devnull  # the machine's indexes and constraints are not what is looked at
}


def build(kind: str, source: Path, out: Path) -> Path:
    """The sdist or wheel of the project in `source`, as pip would build it."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, capture_output=True)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def wheel(programs, tmp_path_factory):
    """The project's wheel, built from its sdist."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "checkout").mkdir()
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "checkout")
    for name in ("rlhfuse", "tools", "examples"):
        shutil.copytree(ROOT / name, folder / "checkout" / name, ignore=shutil.ignore_patterns("__pycache__"))
    with tarfile.open(build("sdist", folder / "checkout", folder / "sdist")) as sdist:
        sdist.extractall(folder, filter="data")
    return build("wheel", next(folder.glob("rlhfuse-*")), folder / "wheel")


@pytest.fixture(scope="module")
def built(wheel):
    """The distribution in the wheel."""
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    return found


@pytest.mark.parametrize(
    "package, extra",
    [
        ("torch", None),
        ("megatron-core", None),
        ("transformers", None),
        ("numba", None),
        ("pydantic", None),
        ("mpi4py", "mpi"),
        ("flashinfer-python", "gpu"),
        ("flash-attn", "flash-attn"),
        ("pytest", "test"),
    ],
)
def test_the_packages_that_the_project_is_built_on_are_declared_once(built, package, extra):
    declared = map(Requirement, built.requires)
    markers = [str(found.marker or "").replace('"', "'") for found in declared if found.name == package]
    assert markers == [f"extra == '{extra}'" if extra else ""]


def test_packages_on_which_limits_rest_have_a_least_version(built):
    least = {found.name: found.specifier for found in map(Requirement, built.requires)}
    assert "2.3.0" not in least["omegaconf"], "it expands aliases of YAML without a limit"
    assert "3.1.5" not in least["jinja2"], "its sandbox can be left"


@pytest.fixture(scope="module")
def examples():
    """What is in the repository's folder, but the programs that make the models there."""
    told = subprocess.run(["git", "ls-files", "examples"], cwd=ROOT, capture_output=True, text=True)
    return [name for name in told.stdout.split() if not name.startswith("examples/make/")]


def test_every_package_is_declared_and_nothing_else(examples):
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    declared = settings["options"]["packages"].split()
    there = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "rlhfuse").rglob("__init__.py")}
    tools = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "tools").rglob("__init__.py")}
    there |= {f"rlhfuse.{folder}" for folder in tools - {"tools.tiny_models"}}  # who makes models has a checkout
    there |= {".".join(("rlhfuse", *Path(name).parent.parts)) for name in examples}
    assert sorted(declared) == sorted(there)


def test_every_file_is_installed(built, examples):
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "rlhfuse").rglob("*.py")]
    files += [f"rlhfuse/{file.relative_to(ROOT)}" for file in (ROOT / "tools").rglob("*.py")]
    installed = set(map(str, built.files))
    assert {*files, *(f"rlhfuse/{name}" for name in examples)} <= installed
    assert not [name for name in installed if "examples/make" in name]


def test_installed_programs_are_tools(built):
    entries = built.entry_points.select(group="console_scripts")
    assert {entry.name for entry in entries} == {f"rlhfuse-{name}" for name in PROGRAMS}


# Beside each torch


def metadata_wheel(folder: Path, name: str, version: str, text: str = "") -> None:
    """A wheel with nothing in it but its metadata."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as file:
        info = f"{stem}.dist-info"
        file.writestr(f"{info}/METADATA", text or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")


@pytest.fixture(scope="module")
def index(built, tmp_path_factory):
    """A folder of wheels: those of known metadata, and for whatever these name an empty one of each version named."""
    folder = tmp_path_factory.mktemp("index")
    known = [built.read_text("METADATA"), *(file.read_text() for file in WHEELS.glob("*.txt"))]
    named: dict[str, set[str]] = {}
    for text in known:
        for line in message_from_string(text).get_all("Requires-Dist"):
            wanted = Requirement(line)
            named.setdefault(wanted.name, {"0"}).update(spec.version for spec in wanted.specifier)
    for text in known:
        name, version = (str(message_from_string(text)[key]) for key in ("Name", "Version"))
        named.pop(name, None)
        metadata_wheel(folder, name, version, text)
    for name, versions in named.items():
        for version in versions:
            metadata_wheel(folder, name, version)
    return folder


def resolve(index: Path, *wanted: str) -> dict[str, str]:
    """What pip would install for `wanted`, name to version; raises CalledProcessError where nothing fits together."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-index", "--quiet"]
    command += ["--only-binary", ":all:", "--find-links", str(index), "--report", "-", *wanted]
    told = subprocess.run(command, env=NO_CONFIG, check=True, capture_output=True, text=True).stdout
    found = [item["metadata"] for item in json.loads(told)["install"]]
    return {item["name"]: item["version"] for item in found}


@pytest.mark.parametrize("torch", TORCH)
def test_the_project_resolves_with_every_extra_beside_each_public_torch(built, index, torch):
    extras = built.metadata.get_all("Provides-Extra")
    assert {"gpu", "flash-attn", "mpi", "test"} <= set(extras)
    found = resolve(index, f"rlhfuse[{','.join(extras)}]", torch.replace("-", "==", 1))
    assert {"megatron-core", "pytest", "flashinfer-python", "flash-attn"} <= found.keys()
    assert f"torch-{found['torch']}" == torch
    for want in map(Requirement, message_from_string((WHEELS / f"{torch}.txt").read_text()).get_all("Requires-Dist")):
        if not want.marker or want.marker.evaluate({"extra": ""}):
            assert want.specifier.contains(found[want.name]), want


def test_each_supported_torch_is_looked_at_and_no_other_is_taken(built):
    (wanted,) = (one for one in map(Requirement, built.requires) if one.name == "torch")
    assert [torch.split("-")[1][:4] for torch in TORCH] == ["2.11", "2.12", "2.13"]
    assert [minor for minor in range(5, 20) if f"2.{minor}.0" in wanted.specifier] == [11, 12, 13]


def test_a_pin_that_torchs_own_wheel_contradicts_is_told(index):
    with pytest.raises(subprocess.CalledProcessError) as told:
        resolve(index, "rlhfuse", "torch==2.13.0", "triton==3.6.0")
    assert "torch==2.13.0 and triton==3.6.0 because these package versions have conflicting" in told.value.stderr


# Alone, in an empty folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel, installed beside the environment's libraries: an empty folder, the programs', and an environment."""
    prefix, empty = tmp_path_factory.mktemp("prefix"), tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*command, "--ignore-installed", "--prefix", str(prefix), str(wheel)], env=NO_CONFIG, check=True)
    packages = next(prefix.glob("lib/*/site-packages"))
    return empty, prefix / "bin", os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}


def test_every_installed_program_says_what_it_does(installed):
    empty, programs, environment = installed
    told = dict(cwd=empty, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    commands = {name: [str(programs / f"rlhfuse-{name}"), "--help"] for name in PROGRAMS}
    started = {name: subprocess.Popen(command, **told) for name, command in commands.items()}
    for name, process in started.items():
        said = process.communicate()[0]
        assert process.returncode == 0 and f"usage: rlhfuse-{name}" in said, said
    assert list(empty.iterdir()) == []


def test_the_quickstart_is_in_the_wheel(installed):
    """As far as reading its settings; that it trains is a slow test."""
    empty, programs, environment = installed
    dump = "print(load_config('examples/quickstart.yaml').model_dump_json())"
    command = [sys.executable, "-c", f"from rlhfuse.config.load import load_config; {dump}"]
    told = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
    config = json.loads(told.stdout)
    for path in (config["actor"]["path"], config["critic"]["path"], *config["data"]["train_files"]):
        assert Path(path).exists() and Path(path).is_relative_to(programs.parent), path
    assert list(empty.iterdir()) == []


@pytest.mark.slow
def test_the_quickstart_trains_from_the_wheel_alone(installed):
    empty, _, environment = installed
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "-m", "rlhfuse.tools.train_ppo"]
    command += ["--config", "examples/quickstart.yaml", "trainer.iterations=2", "trainer.output_dir=run"]
    told = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert len((empty / "run" / "metrics.jsonl").read_text().splitlines()) == 2 and (empty / "run" / "export").is_dir()


def test_no_folder_of_a_user_changes_how_imports_are_sorted(programs, tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/sample.py").write_text(
        "import pytest\nimport runs\n\nimport rlhfuse\n\nprint(pytest, runs, rlhfuse)\n"
    )
    (tmp_path / "runs").mkdir()  # as a first run makes it
    (tmp_path / "runs/own.py").write_text("import  os")
    told = subprocess.run([sys.executable, "-m", "ruff", "check", "."], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout
