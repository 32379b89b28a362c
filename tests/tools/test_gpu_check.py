"""scripts/gpu_check.sh without a GPU: what it says, how its checks are kept apart, and the checks rehearsed on CPU."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import triton_interpreter  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_check  # noqa: E402
from gpu_checks import (  # noqa: E402  # noqa: E402
    catalog,
    generation,
    hang,
    isolation,
    kept,
    kernels,
    kit,
    layers,
    migration,
    sampling,
    speed,
    training,
    training_speed,
    waits,
)
from gpu_checks.bench import TINY, Bench, write_model  # noqa: E402
from gpu_checks.isolation import Check, Result  # noqa: E402
from gpu_checks.luggage import write_references  # noqa: E402
from gpu_checks.references import References  # noqa: E402
from gpu_checks.result import CheckFailed, require  # noqa: E402

from rlhfuse.base.errors import InputError  # noqa: E402
from rlhfuse.gen.gpu import layer_kernels  # noqa: E402
from rlhfuse.models import build  # noqa: E402
from rlhfuse.parallel import weight_gradients  # noqa: E402
from rlhfuse.parallel.optimizer import ModelOptimizer  # noqa: E402


def call(*arguments: str, hide_gpu: bool = True) -> tuple[int, dict]:
    """Exit code and the object of the last line."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    if hide_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip(), done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def bench(tmp_path):
    return Bench("cpu", tmp_path, References(None))


# the program


def test_without_cuda_nothing_is_checked_and_it_says_so():
    code, report = call()
    assert code == 0
    assert report["cuda"] is False and report["checks"] == [] and "nothing was checked" in report["said"]
    assert report["environment"]["torch"] and any("NCCL" in line for line in report["one_gpu_cannot_show"])


def test_a_rehearsal_runs_the_chosen_checks_and_keeps_the_object(tmp_path):
    out = tmp_path / "check.json"
    code, report = call("--device", "cpu", "--only", "attention_float32_16", "--out", str(out))
    assert code == 0 and report["ok"] and json.loads(out.read_text()) == report
    names = [check["name"] for check in report["checks"]]
    assert names == ["probe", "paged_attention_float32_16", "decode_attention_float32_16"]


def session(monkeypatch, tmp_path, checks, until=math.inf):
    """A rehearsal of made-up checks whose processes are forked from this one; the report on file and exit code."""
    import multiprocessing

    monkeypatch.setattr(gpu_check, "REHEARSAL", 1)
    monkeypatch.setattr(isolation, "starts_with", lambda: multiprocessing.get_context("fork"))
    monkeypatch.setattr(catalog, "all_checks", lambda: checks)
    monkeypatch.setattr(catalog, "PROBE", Check("probe", "isolation:fine", {}, 1, 60))
    code = gpu_check.run_checks("cpu", "", until, tmp_path / "out.json", None)
    return json.loads((tmp_path / "out.json").read_text()), code


def fine(bench, **arguments):
    return {"cuda": False, "environment": {}} | arguments


def hangs(bench):
    time.sleep(600)


def crashes(bench):
    print("about to", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def fails(bench):
    require(False, {"error": 2})


def test_what_hangs_crashes_or_fails_is_named_and_stops_no_other(monkeypatch, tmp_path, capfd):
    for function in (fine, hangs, crashes, fails):
        monkeypatch.setattr(isolation, function.__name__, function, raising=False)
    kinds = {"hung": "hangs", "crashed": "crashes", "failed": "fails", "good": "fine"}
    checks = [Check(name, f"isolation:{function}", {}, 1, 8) for name, function in kinds.items()]
    report, code = session(monkeypatch, tmp_path, checks)
    found = {check["name"]: check for check in report["checks"]}
    assert code == 1 and not report["ok"] and list(found) == ["probe", *kinds]
    assert found["hung"]["detail"].startswith("no answer within 8 s") and "in hangs" in found["hung"]["detail"]
    assert "ended by signal 11" in found["crashed"]["detail"] and "about to" in found["crashed"]["detail"]
    assert 'CheckFailed: {"error": 2}' in found["failed"]["detail"]
    assert found["good"]["ok"] and found["probe"]["ok"]


def test_a_budget_leaves_out_what_comes_last(monkeypatch, tmp_path):
    monkeypatch.setattr(isolation, "fine", fine, raising=False)
    checks = [Check(f"number_{i}", "isolation:fine", {"i": i}, 1, 60) for i in range(5)]
    report, code = session(monkeypatch, tmp_path, checks, time.monotonic() - 1)
    assert code == 0 and report["left_out"] == [f"number_{i}" for i in range(5)]
    report, _ = session(monkeypatch, tmp_path, checks, time.monotonic() + 500)
    assert report["left_out"] == [] and len(report["checks"]) == 6


def test_every_check_of_the_catalog_can_be_called():
    import importlib
    import inspect

    checks = catalog.all_checks()
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        module, _, function = check.function.partition(":")
        found = getattr(importlib.import_module(f"gpu_checks.{module}"), function)
        inspect.signature(found).bind(None, **check.arguments)
        assert check.limit > check.seconds


# the luggage


def test_wheels_are_installed_where_the_machine_lacks_them():
    wheels = [Path(f"{name}-py3-none-any.whl") for name in ("a_b-1.2", "megatron_core-0.16.1", "c-3.0", "d-2.10")]
    there = {"megatron-core": "0.17.0", "c": "3.1", "d": "2.9.1"}
    assert [kit.wheel_of(file)[0] for file in kit.lacking(wheels, there)] == ["a-b", "megatron-core", "d"]
    assert kit.lacking(wheels, {"a-b": "1.2", "megatron-core": "0.16.1", "c": "3.0", "d": "2.10"}) == []


def test_wheels_unpack_offline_into_a_folder_of_their_own(tmp_path, monkeypatch):
    import zipfile

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
    import ast

    known = "torch numpy numba llvmlite transformers tokenizers safetensors pyarrow matplotlib jinja2 yaml rich triton"
    known = {*known.split(), "huggingface_hub", "tensorboard", "rlhfuse", "gpu_checks", "train_ppo"}
    optional = {"mpi4py", "flash_attn", "flashinfer", "transformer_engine", "vaderSentiment", "wandb"}
    carried = {"megatron", "omegaconf", "pydantic", "pebble", "scipy"}
    files = [*ROOT.glob("rlhfuse/**/*.py"), *ROOT.glob("tools/gpu_check*/*.py"), ROOT / "tools/gpu_check.py"]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {name.split(".")[0] for name in names} - sys.stdlib_module_names
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
    written = weights_of(bench)
    assert all(torch.equal(weight, written[name]) for name, weight in kept.get("weights_0", never).items())


def weights_of(bench):
    from safetensors.torch import load_file

    return load_file(bench.tiny() / "model.safetensors")


# the checks, rehearsed


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_attention_agrees_with_the_formula(bench, kind):
    assert set(generation.check_varlen(bench, kind)) == {"forward", "dq", "dk", "dv"}
    for block_tokens in (16, 256):
        assert generation.check_paged(bench, kind, block_tokens)["relative_error"] > 0
        assert generation.check_decode_attention(bench, kind, block_tokens)["relative_error"] > 0


def test_wrong_attention_is_found(bench, monkeypatch):
    formula = generation.reference_attention
    monkeypatch.setattr(generation, "reference_attention", lambda q, k, v, offset: formula(q, k, v, offset - 1))
    for check in (generation.check_paged, generation.check_decode_attention):
        with pytest.raises(CheckFailed, match="relative_error"):
            check(bench, "float32", 16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_kernels_agree_with_their_formulas(bench, kind):
    assert set(kernels.check_paged_attention(bench, kind, 16)) == {"decode", "mixed"}
    assert set(kernels.check_linear_logprobs(bench, kind)) == {"logprobs", "entropy", "dx", "dweight"}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_layers_are_made_of_agrees_with_its_formulas(bench, kind):
    found = layers.check_training_kernels(bench, kind)
    assert set(found) == {"swiglu", "swiglu_gradient", "rotation", "rotation_gradient"}
    assert len(layers.check_layer_kernels(bench, kind)) == 8
    assert layers.check_accumulation(bench, kind)["weights_with_added_products"] == 16


def test_wrong_layers_are_found(bench, monkeypatch):
    kernels_there = layer_kernels.triton_layer()
    wrong = kernels_there._replace(add_norm=lambda *arguments: 1.1 * kernels_there.add_norm(*arguments))
    monkeypatch.setattr(layer_kernels, "triton_layer", lambda: wrong)
    with pytest.raises(CheckFailed, match='"add_norm": 0.'):
        layers.check_layer_kernels(bench, "float32")
    monkeypatch.setattr(weight_gradients, "add_product", lambda total, a, b: total.add_(a @ b, alpha=0.9))
    monkeypatch.setattr(layers, "add_product", weight_gradients.add_product)
    with pytest.raises(CheckFailed, match='"product": 0.'):
        layers.check_accumulation(bench, "float32")


def test_fused_adam_steps_as_the_plain_one(bench, monkeypatch):
    assert layers.check_fused_adam(bench)["weights"] < 1e-6
    step = ModelOptimizer.step
    monkeypatch.setattr(ModelOptimizer, "step", lambda self, lr: step(self, 1.1 * lr))
    with pytest.raises(CheckFailed, match="weights"):
        layers.check_fused_adam(Bench("cpu", bench.folder / "again", References(None)))


def test_libraries_that_are_not_here_are_skipped_by_name(bench, monkeypatch):
    assert "CUDA" in layers.check_library_attention(bench, "flash_attn", 256)["skipped"]
    assert layers.check_transformer_engine(bench)["skipped"] == "Transformer Engine runs on CUDA alone"
    errors = layers.check_library_attention(bench, "triton", 16)
    assert set(errors) == {"decode", "mixed"} and 0 < max(errors.values()) < 0.05
    monkeypatch.setattr(layers, "engine_obstacle", lambda *_: "")
    monkeypatch.setattr(build, "transformer_engine_slots", lambda rotary: build.local_slots(rotary, bench.where))
    assert layers.check_transformer_engine(bench)["error"] == 0


def test_engines_with_and_without_graphs_agree(bench):
    found = generation.check_graphs(bench, "float32")
    assert found["equal_tokens"] == found["tokens"] and found["capture_seconds"] == 0


@pytest.mark.parametrize("mode", ["kv", "tokens"])
def test_samples_that_move_are_those_that_stay(tmp_path, mode):
    found = migration.check_move(Bench("cpu", tmp_path, References(None)), "float32", mode)
    assert found["equal_tokens"] == found["tokens"] and found["moved"] == 6
    assert found["recomputed"] == (6 if mode == "tokens" else 0)


def test_blocks_arrive_and_their_rate_is_told(bench):
    found = migration.check_block_copies(bench)
    assert found["read_bytes_per_second"] > 0 and found["write_bytes_per_second"] > 0


def test_draws_agree_and_a_wrong_one_is_found(bench, monkeypatch):
    assert sampling.check_parity(bench)["other_tokens"] == 0
    draw = sampling.device_draw

    def wrong(logits, batch):
        found = draw(logits, batch)()
        found[0] = (found[0] + 1) % logits.shape[1]
        return lambda: found

    monkeypatch.setattr(sampling, "device_draw", wrong)
    with pytest.raises(CheckFailed, match='"other_tokens": 12'):
        sampling.check_parity(bench)
    monkeypatch.setattr(sampling, "device_draw", draw)
    assert set(sampling.check_speed(bench)) == {"2_plain", "2_top_k_and_top_p"}


def test_a_step_is_refused_where_a_gradient_is_not_finite(bench):
    found = training.check_refused_step(bench)
    assert found["nan"] == found["infinity"] == {"finite": False, "changed_weights": 0}
    assert found["finite"]["changed_weights"] > 0


def test_training_on_the_device_is_compared_with_a_reference(bench, monkeypatch):
    assert training.check_training(bench, "float32")["relative_error"] == 0
    reference = training.training_reference

    def other(*arguments):
        found = reference(*arguments)
        next(iter(found["gradients"].values())).view(-1)[0] += 1.0
        return found

    monkeypatch.setattr(training, "training_reference", other)
    again = Bench("cpu", bench.folder / "again", References(None))
    with pytest.raises(CheckFailed, match="worst_gradient"):
        training.check_training(again, "float32")


def test_split_backwards_are_compared_with_whole_ones(bench):
    assert training.check_split_backward(bench, "bfloat16") == {"gradients": 0, "put_off": 16}


def test_stages_head_optimizer_and_weights_are_timed(bench):
    stage, head = training_speed.check_stage(bench, 64), training_speed.check_head(bench, 64)
    assert stage["forward_seconds"] > 0 and 0 < stage["gemm_fraction"] < 1 and stage["mfu"] is None
    assert head["tokens"] == 32 and head["peak_bytes_with_head"] is None
    assert training_speed.check_optimizer(bench)["copy_bandwidth_fraction"] > 0
    assert training_speed.check_weights(bench)["load_bytes_per_second"] > 0
    assert waits.check_waits(bench)["decode_steps"] == [0] * waits.COUNTED
    assert "skipped" in hang.check_hangs(bench)


def test_operations_of_a_layer_are_those_of_its_products_and_of_attention(tmp_path):
    spec = speed.spec_of(speed.SHAPES["8b"], tmp_path / "8b")
    dense = 2 * 4 * spec.layer_parameters * 4096
    assert dense < training_speed.layer_operations(spec, 4, [2048, 2048]) < 1.1 * dense
    longer = training_speed.layer_operations(spec, 4, [4096])
    assert longer - training_speed.layer_operations(spec, 4, [2048, 2048]) == 2 * 4 * 4096 * 2 * 2048**2


def test_speed_is_measured_on_a_tiny_shape(tmp_path):
    found = speed.measure(TINY, tmp_path / "tiny", torch.device("cpu"), 16, (1, 3))
    assert "graphs" not in found and found["data_sheet_bytes_per_second"] is None
    assert set(found["eager"]["decode"]) == {"1", "3"}
    for row in found["eager"]["decode"].values():
        assert row["tokens_per_second"] > 0 and 0 < row["copy_bandwidth_fraction"] < 1
    assert 0 < found["eager"]["prefill_gemm_fraction"] < 1
    assert found["eager"]["verify"]["step_seconds"] > 0 and found["eager"]["verify"]["over_decode_step"] > 0
    json.dumps(found)


def test_decode_steps_of_longer_contexts_are_measured(bench):
    found = speed.check_long_contexts(bench, "8b")
    assert set(found["decode"]) == {"64_1", "64_2"}
    assert all(row["step_seconds"] > 0 for row in found["decode"].values())


def test_a_shape_too_large_for_the_card_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 << 30, 24 << 30))
    found = speed.measure(speed.SHAPES["8b"], tmp_path / "8b", torch.device("cuda"), 256, speed.BATCHES)
    assert set(found) == {"skipped"} and "16384 MiB are free" in found["skipped"]


def test_what_a_step_reads_and_computes(tmp_path):
    small, large = (speed.spec_of(speed.SHAPES[size], tmp_path / size) for size in ("1b", "8b"))
    assert 1.2e9 < small.parameters() < 1.3e9 and 8.0e9 < large.parameters() < 8.1e9
    assert speed.step_bytes(small, 0) == 2 * small.parameters()
    assert speed.step_bytes(large, 0) == 2 * (large.parameters() - 128256 * 4096)
    assert speed.step_bytes(large, 10) - speed.step_bytes(large, 0) == 10 * 32 * 2 * 8 * 128 * 2
    exact = 2 * (small.parameters() - small.embedding_parameters) * 16 * 512
    assert exact < speed.prefill_operations(small, 16, 512) < 1.1 * exact


def test_a_model_is_the_same_everywhere(tmp_path):
    first, second = (write_model(tmp_path / name, TINY) / "model.safetensors" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    assert Result("a", True, 0.0, None).ok


@pytest.mark.parametrize(
    "recorded, again, keeps, good",
    [
        ([5, 5, 5], [5, 10, 15], (True, False), True),
        ([5, 10, 15], [5, 10, 15], (True, False), False),  # recorded anew
        ([5, 5, 5], [5, 5, 5], (True, True), False),  # nothing was released
        ([0, 0, 0], [0, 0, 0], (True, False), False),  # nothing was recorded
        ([5, 5, 5], [5, 10, 15], (False, False), False),  # not as planned
    ],
)
def test_a_run_that_records_twice_is_no_kept_one(recorded, again, keeps, good):
    found = {
        name: {"keeps_generation": keep, "iterations": [{"recorded_shapes": count} for count in counts]}
        for name, keep, counts in zip(("kept", "released"), keeps, (recorded, again))
    }
    assert kept.as_planned(found, on_gpu=True) == good
    assert not kept.as_planned(found, on_gpu=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["shared_pipelines", "shared_cut", "resumed", "not_finite", "one_rank", "grpo", "kept"]
)
def test_whole_programs_are_rehearsed(name):
    code, report = call("--device", "cpu", "--only", name)
    assert code == 0 and len(report["checks"]) > 1, report


@pytest.mark.gpu
def test_every_check_is_good_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    code, report = call(hide_gpu=False)
    assert code == 0, [check for check in report["checks"] if not check["ok"]]
