"""What is carried to a GPU machine without network."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from gpu_checks import generation, kit, sampling
from gpu_checks.bench import Bench, References
from gpu_checks.luggage import write_references
from safetensors.torch import load_file
from testkit.imports import imports
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError


def test_wheels_are_installed_where_the_machine_lacks_them():
    wheels = [Path(f"{name}-py3-none-any.whl") for name in ("a_b-1.2", "megatron_core-0.16.1", "c-3.0", "d-2.10")]
    there = {"megatron-core": "0.17.0", "c": "3.1", "d": "2.9.1"}
    assert [kit.wheel_of(file)[0] for file in kit.lacking(wheels, there)] == ["a-b", "megatron-core", "d"]
    assert kit.lacking(wheels, {"a-b": "1.2", "megatron-core": "0.16.1", "c": "3.0", "d": "2.10"}) == []


def test_wheels_unpack_offline_into_a_folder_of_their_own(programs, tmp_path, monkeypatch):
    name = "gpu_luggage-1.0"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("gpu_luggage.py", "VALUE = 7")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: gpu-luggage\nVersion: 1.0\n")
        wheel.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    target = kit.install(tmp_path)
    assert (target / "gpu_luggage.py").read_text() == "VALUE = 7" and target.parent == tmp_path
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "x")
    kit.put_first(target)
    assert sys.path[0] == str(target) and os.environ["PYTHONPATH"] == f"{target}{os.pathsep}x"
    assert kit.size_of(tmp_path) < 2000
    with pytest.raises(InputError, match="no wheels there; fill it with scripts/gpu_check.sh --prepare"):
        kit.install(target)


def test_the_luggage_holds_what_the_program_imports_beside_what_images_have():
    known = "torch numpy numba llvmlite transformers tokenizers safetensors pyarrow matplotlib jinja2 yaml rich triton"
    known = {*known.split(), "huggingface_hub", "tensorboard", "pydantic_core", "rlhfuse", "train_ppo"}
    known |= {"gpu_checks", "cost_profiles", "program", "run_comparison", "text_table"}  # of tools
    optional = {"mpi4py", "flash_attn", "flashinfer", "vaderSentiment", "wandb"}
    carried = {"megatron", "omegaconf", "pydantic", "scipy"}
    files = [*ROOT.glob("rlhfuse/**/*.py"), *ROOT.glob("tools/gpu_check*/*.py"), ROOT / "tools/gpu_check.py"]
    found = {name.split(".")[0] for file in files for name in imports(file, [])} - sys.stdlib_module_names
    assert found - known - optional == carried
    told = " ".join((*kit.ALONE, *kit.WITH_NEEDS))
    assert all(name in told for name in carried)


def test_references_are_read_not_computed(tmp_path, bench):
    write_references(tmp_path / "kept")
    kept = References(tmp_path / "kept")

    def never():
        raise AssertionError("this is in a file")

    here = Bench("cpu", tmp_path / "here", kept)
    here.folder.mkdir()
    assert sampling.draws_reference(kept)["tokens"] == kept.get("draws", never)["tokens"]
    found = generation.check_engine(here, "float32", 16)
    assert found["equal_tokens"] == found["tokens"] == 256 and 0 < found["max_logprob_difference"] < 1e-4
    for kind in ("float32", "bfloat16"):
        assert len(kept.get(f"engine_{kind}", never)) == 8 and kept.get(f"training_{kind}", never)["norm"] > 0
    written = load_file(bench.tiny() / "model.safetensors")
    assert all(torch.equal(weight, written[name]) for name, weight in kept.get("weights_0", never).items())
