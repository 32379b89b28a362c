"""What CUDA and torch read when they start is set before torch is imported, and never instead of a user's value."""

import os
import re

import pytest
from testkit.paths import ROOT

from rlhfuse.base.cuda_environment import WANTED, recording_obstacle, set_cuda_environment


def test_what_is_missing_is_set_and_what_is_there_stays():
    environ = {"CUDA_MODULE_LOADING": "LAZY"}
    assert set_cuda_environment(environ) == ["CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "NCCL_GRAPH_REGISTER"]
    assert environ == {
        "CUDA_MODULE_LOADING": "LAZY",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NCCL_GRAPH_REGISTER": "0",
    }
    assert set_cuda_environment(environ) == []


@pytest.mark.parametrize(
    "environ, refused",
    [
        (WANTED, ""),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "NCCL_GRAPH_REGISTER is not set"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4, expandable_segments: True"}, "is not set"),
        ({**WANTED, "NCCL_GRAPH_REGISTER": "1"}, "NCCL_GRAPH_REGISTER=1, .*export NCCL_GRAPH_REGISTER=0"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False", "NCCL_GRAPH_REGISTER": "1"}, ""),
        ({}, ""),
    ],
)
def test_graphs_with_nccl_want_no_registered_buffers_where_segments_grow(environ, refused):
    found = recording_obstacle(environ)
    assert re.search(refused, found) and bool(found) == bool(refused)


@pytest.fixture
def unset(monkeypatch):
    """An environment that says nothing of it."""
    for name in os.environ:
        if name in WANTED or "ALLOC_CONF" in name:
            monkeypatch.delenv(name)


@pytest.mark.parametrize("program", ["train_ppo", "profile_costs"])
def test_programs_set_it_before_torch_is_imported(programs, unset, program):
    """At the first import of torch, by whatever module, every name is there."""
    code = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print([os.environ.get(key) for key in {list(WANTED)!r}])
            sys.exit(0)
sys.meta_path.insert(0, Watch())
import {program}
import torch
"""
    done = programs.python("-c", code)
    assert done.stdout.strip() == str(list(WANTED.values())), done.stderr


@pytest.mark.parametrize(
    "given, kept",
    [
        ({}, {}),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "16", "PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": None}),
    ],
)
def test_launch_scripts_export_it(programs, unset, given, kept):
    """The script's own lines, run by bash: what a child of it sees."""
    text = (ROOT / "scripts/slurm/train.sbatch").read_text()
    (lines,) = re.findall(r"^export CUDA_MODULE_LOADING.*?^fi$", text, re.M | re.S)
    assert text.index(lines) < re.search(r"^each_node=", text, re.M).start()
    done = programs.run("bash", "-euo", "pipefail", "-c", f"{lines}\nenv", **given)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert [seen.get(name) for name in WANTED] == [{**WANTED, **given, **kept}[name] for name in WANTED], done.stderr
