"""scripts/gpu_check.sh without a GPU: what it says, how its checks are kept apart, and the checks rehearsed on CPU."""

import ast
import atexit
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import gpu_check
import pytest
import torch
from gpu_checks import catalog, generation, isolation, kept, kit, migration, sampling, speed
from gpu_checks import programs as whole_programs
from gpu_checks.bench import Bench, References
from gpu_checks.isolation import Check
from gpu_checks.luggage import write_references
from gpu_checks.result import CheckFailed, require
from safetensors.torch import load_file
from testkit import triton_interpreter  # noqa: F401
from testkit.imports import imports
from testkit.paths import ROOT
from testkit.programs import eventually

from rlhfuse.base.errors import InputError
from rlhfuse.models import build
from rlhfuse.parallel.device import choose_device


@pytest.fixture
def call(programs):
    """scripts/gpu_check.sh: arguments -> its exit code and the object of the last line."""

    def call(*arguments: object, **variables: str) -> tuple[int, dict]:
        hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, **variables}
        done = programs.run("bash", ROOT / "scripts" / "gpu_check.sh", *arguments, **hidden)
        assert done.stdout.strip(), done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    return call


@pytest.fixture
def bench(tmp_path):
    return Bench("cpu", tmp_path, References(None))


# the program


def test_without_cuda_nothing_is_checked_and_it_says_so(call):
    code, report = call()
    assert code == 0
    assert report["cuda"] is False and report["checks"] == [] and "nothing was checked" in report["said"]
    assert report["environment"]["torch"] and any("NCCL" in line for line in report["not_shown"])


def test_a_rehearsal_runs_the_chosen_checks_and_keeps_the_object(call, tmp_path):
    """Those of several GPUs on two ranks over gloo."""
    out, ranks = tmp_path / "check.json", ("nccl_links", "nccl_captured", "nccl_switch", "nccl_moved")
    code, report = call("--device", "cpu", "--names", f"rates,paged_*32_16,{','.join(ranks)}", "--out", str(out))
    assert code == 0 and report["ok"] and json.loads(out.read_text()) == report
    found = {check["name"]: check["detail"] for check in report["checks"]}
    assert list(found) == ["probe", "rates", *ranks, "paged_attention_float32_16"]
    links, captured, switch, moved = (found[name] for name in ranks)
    for told in (links, captured, moved):
        assert all(one["seconds"] > 0 and one["bytes"] > 0 for one in told["figures"])
    assert len(links["figures"]) == 5 and links["wrong_numbers"] == 0
    assert captured["different"] == 0 and captured["graph_register"] == "0"
    assert switch == {"skipped": "sums of tensor ranks: gloo (not by the switch: it needs a GPU for each rank)"}
    assert moved["equal_tokens"] == moved["tokens"] and moved["moved"] == migration.SAMPLES // 2


def made_up(function, name: str = "", limit: float = 600, small: bool = False, background: bool = False, **arguments):
    """A check of `session`; only a hang meets its limit."""
    name = name or function.__name__
    return Check(name, f"made_up:{function.__name__}", arguments, 1, limit, small=small, background=background)


@pytest.fixture
def session(monkeypatch, tmp_path):
    """A rehearsal of made-up checks whose processes are forked from this one -> the report on file, the exit code."""
    monkeypatch.setitem(sys.modules, "gpu_checks.made_up", sys.modules[__name__])
    monkeypatch.setattr(gpu_check, "REHEARSAL", 1)
    monkeypatch.setattr(isolation, "starts_with", lambda: multiprocessing.get_context("fork"))
    monkeypatch.setattr(catalog, "PROBE", made_up(fine, "probe"))

    def session(*checks: Check, **request):
        monkeypatch.setattr(catalog, "all_checks", lambda gpus=8: [check for check in checks if check.gpus <= gpus])
        code = gpu_check.run_checks(gpu_check.Request("cpu", out=tmp_path / "out.json", **request))
        return json.loads((tmp_path / "out.json").read_text()), code

    return session


def fine(bench, **arguments):
    return {"cuda": False, "environment": {}} | arguments


def hangs(bench):
    time.sleep(600)


def crashes(bench):
    print("about to", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def fails(bench):
    require(False, {"error": 2})


def own_process(bench):
    return {"process": os.getpid()}


def fails_among_others(bench):
    """Good in a process that has run nothing else."""
    require(bench.folder.name.endswith(".alone"), {"state": "left behind"})
    return {}


def waits_for_a_file(bench):
    while not (bench.folder.parent / "later" / "log.txt").exists():
        time.sleep(0.01)
    return {"jobs": os.environ["MAX_JOBS"]}


def counts(bench, file, wanted):
    """Good from the run of that number on."""
    with open(file, "a") as stream:
        stream.write("x")
    require(len(Path(file).read_text()) >= wanted, "too early")
    return {}


def test_what_hangs_crashes_or_fails_is_named_and_stops_no_other(session, monkeypatch, capfd):
    result = isolation.Worker.result

    def once_it_hangs(worker):
        """However long this machine takes to get there."""
        if worker._check.name == "hangs":
            eventually(lambda: worker._log.exists() and "in hangs" in worker._log.read_text())
        return result(worker)

    monkeypatch.setattr(isolation.Worker, "result", once_it_hangs)
    report, code = session(made_up(hangs, limit=2), made_up(crashes), made_up(fails), made_up(fine))
    found = {check["name"]: check for check in report["checks"]}
    assert code == 1 and not report["ok"] and list(found) == ["probe", "hangs", "crashes", "fails", "fine"]
    assert found["hangs"]["detail"].startswith("no answer within 2 s") and "in hangs" in found["hangs"]["detail"]
    assert "ended by signal 11" in found["crashes"]["detail"] and "about to" in found["crashes"]["detail"]
    assert 'CheckFailed: {"error": 2}' in found["fails"]["detail"]
    assert found["fine"]["ok"] and found["probe"]["ok"]


def test_small_checks_share_a_process_until_one_fails(session, capfd):
    kinds = {"a": own_process, "b": own_process, "bad": fails, "c": own_process, "odd": fails_among_others}
    small = [made_up(function, name, small=True) for name, function in kinds.items()]
    report, code = session(*small, made_up(own_process, "large"))
    found = {check["name"]: check for check in report["checks"]}
    a, b, c, large = (found[name]["detail"]["process"] for name in ("a", "b", "c", "large"))
    assert a == b and len({a, c, large, os.getpid()}) == 4
    assert code == 1 and [name for name, check in found.items() if not check["ok"]] == ["bad"]
    assert 'odd failed among others, and runs alone: CheckFailed: {"state": "left behind"}' in capfd.readouterr().err


def test_what_compiles_runs_beside_the_others_from_the_beginning(session):
    """Here it ends only because the check that stands before it has begun."""
    report, code = session(made_up(fine, "later"), made_up(waits_for_a_file, "building", background=True))
    assert code == 0 and [check["name"] for check in report["checks"]] == ["probe", "later", "building"]
    assert int(report["checks"][-1]["detail"]["jobs"]) >= 1


def test_a_second_call_goes_on_where_the_first_one_stopped(session, tmp_path):
    ran = {"good": tmp_path / "good", "bad": tmp_path / "bad"}
    checks = [made_up(counts, name, file=str(file), wanted=1 + (name == "bad")) for name, file in ran.items()]
    first, code = session(*checks)
    assert code == 1 and [check["ok"] for check in first["checks"]] == [True, True, False]
    second, code = session(*checks, made_up(fine, "new"), done=tmp_path / "out.json")
    assert code == 0 and [check["name"] for check in second["checks"]] == ["probe", "good", "bad", "new"]
    assert second["checks"][1] == first["checks"][1] and [file.read_text() for file in ran.values()] == ["x", "xx"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"environment": {"torch": "2.12.0"}}, "its torch is 2.12.0, here it is None; run all checks here, without"),
        ({"environment": None}, "is not what scripts/gpu_check.sh --out wrote"),
        ({"checks": [{"name": "a"}]}, "checks: .*is missing; add it"),
    ],
)
def test_results_of_other_places_are_not_taken_over(session, tmp_path, change, message):
    file = tmp_path / "done.json"
    file.write_text(json.dumps({"environment": {}, "checks": [], **change}))
    with pytest.raises(InputError, match=message):
        session(made_up(fine), done=file)


def test_a_name_that_is_none_is_refused_with_the_nearest():
    every = catalog.all_checks()
    found = [one.name for one in gpu_check.chosen(every, "stage_*, head_8192")]
    assert found == ["stage_500", "stage_2048", "stage_8192", "head_8192"]
    assert gpu_check.chosen(every, "") == every
    with pytest.raises(InputError, match="--names decod_8b: no check is called so; the nearest is decode_8b"):
        gpu_check.chosen(every, "waits,decod_8b")


def test_checks_for_more_gpus_than_there_are_are_refused_where_they_are_all_that_is_asked_for(session):
    checks = [replace(made_up(fine, f"on_{gpus}"), gpus=gpus) for gpus in (2, 4)]
    report, code = session(*checks, names="on_*")
    assert code == 0 and [check["name"] for check in report["checks"]] == ["probe", "on_2"]
    with pytest.raises(InputError, match="--names on_4: needs 4 GPUs, here are 2"):
        session(*checks, names="on_4")


# the catalogue


def test_the_first_call_says_whether_it_works_and_how_fast():
    seconds = {name: sum(check.seconds for check in checks) for name, checks in catalog.tiers(8).items()}
    assert seconds["first"] <= 240 and seconds["first"] + seconds["nccl"] <= 540 - 60  # starts of processes beside
    assert sum(seconds.values()) <= 1230 and sum(seconds.values()) - seconds["nccl"] <= 20 * 60
    names = [check.name for check in catalog.all_checks(1)]
    before = sum(check.seconds for check in catalog.all_checks(1)[: names.index("decode_8b")])
    assert before <= 60
    told = {"decode_8b", "attention_triton", "stage_500", "stage_2048", "stage_8192", "head_8192", "optimizer"}
    assert told <= {check.name for check in catalog.tiers(1)["first"]}


@pytest.mark.parametrize(
    "gpus, ranks, cannot", [(1, set(), 6), (2, {2}, 3), (4, {4}, 2), (8, {8, 4}, 1), (16, {8, 4}, 0)]
)
def test_what_is_checked_and_what_cannot_be_shown_follow_the_number_of_gpus(gpus, ranks, cannot):
    several = [check for check in catalog.all_checks(gpus) if check.gpus > 1]
    assert {check.arguments["ranks"] for check in several if "ranks" in check.arguments} == ranks
    assert all(check.eager and check.name.startswith("nccl_") for check in several)
    assert ("nccl_cut" in {check.name for check in several}) == (gpus >= 4)
    assert len(catalog.not_shown(gpus)) == cannot and bool(several) == (gpus > 1)
    names = [check.name for check in catalog.all_checks(gpus)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("visible, first", [(None, "0"), ("5,6,7", "5")])
def test_ranks_that_share_a_gpu_see_one_of_eight(bench, monkeypatch, visible, first):
    """`choose_device` of a rank of check_shared, on a node whose GPUs are as many as are visible."""
    import train_ppo

    def count():
        return len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(","))

    def rank_main():
        device = choose_device("cuda", int(os.environ["LOCAL_RANK"]), 1, share_gpu=True)
        out = Path(next(a for a in sys.argv if a.startswith("trainer.output_dir=")).partition("=")[2])
        out.mkdir(exist_ok=True)
        told = {"device": str(device.torch_device), "visible": os.environ["CUDA_VISIBLE_DEVICES"]}
        os.write(1, f"({device.backend})".encode())
        (out / f"{os.environ['RANK']}.json").write_text(json.dumps(told))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(train_ppo, "main", rank_main)
    monkeypatch.setattr(whole_programs, "metrics", lambda out: [{"fusion/migrated_samples": 1}])
    ended = bench.folder / "ended"
    atexit.register(ended.touch)  # for this process to run
    monkeypatch.setattr(whole_programs, "differences", lambda a, b: {"relative_difference": 0.0, "bit_equal": True})
    found = whole_programs.check_shared(replace(bench, kind="cuda"), "pipelines")
    atexit.unregister(ended.touch)
    assert found["backend"] == "shared_gpu" and not ended.exists()
    for run in ("fused", "serial"):
        told = [json.loads((bench.folder / run / f"{rank}.json").read_text()) for rank in range(4)]
        assert told == [{"device": "cuda:0", "visible": first}] * 4


def test_engines_of_checks_compile_no_library_but_by_name():
    """flashinfer's kernels take minutes to compile: `auto` would, in each process that first asks for a shape."""
    for file in (ROOT / "tools" / "gpu_checks").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "EngineOptions":
                assert "attention" in {word.arg for word in node.keywords}, f"{file}:{node.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "choose_paged":
                assert len(node.args) == 2, f"{file}:{node.lineno}"


def test_a_budget_leaves_out_what_comes_last(session):
    checks = [made_up(fine, f"number_{i}", i=i) for i in range(5)]
    report, code = session(*checks, until=time.monotonic() - 1)
    assert code == 0 and report["left_out"] == [f"number_{i}" for i in range(5)]
    report, _ = session(*checks, until=time.monotonic() + 5000)
    assert report["left_out"] == [] and len(report["checks"]) == 6


def test_every_check_of_the_catalog_can_be_called():
    for check in catalog.all_checks():
        found = resolve_name(f"gpu_checks.{check.function}")
        inspect.signature(found).bind(None, **check.arguments)
        assert check.limit > check.seconds


# the luggage


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
    known = {*known.split(), "huggingface_hub", "tensorboard", "rlhfuse", "train_ppo"}
    known |= {"gpu_checks", "cost_profiles", "text_table"}  # of tools
    optional = {"mpi4py", "flash_attn", "flashinfer", "transformer_engine", "vaderSentiment", "wandb"}
    carried = {"megatron", "omegaconf", "pydantic", "pebble", "scipy"}
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


# the checks, rehearsed

KINDS = ("float32", "bfloat16")
GOOD = (  # they compare, and what they find is good
    *(f"{name}_{kind}" for name in ("varlen_attention", "linear_logprobs", "layer_kernels") for kind in KINDS),
    *(f"{name}_{kind}" for name in ("training_kernels", "accumulation", "training") for kind in KINDS),
    *(f"paged_attention_{kind}_{block_tokens}" for kind in KINDS for block_tokens in (16, 256)),
    *("fused_adam", "sampler_parity", "split_backward_bfloat16", "refused_step", "graphs_float32", "waits"),
    *("move_float32_kv", "move_float32_tokens"),
)
TIMED = ("rates", "stage_500", "head_8192", "optimizer", "weights_to_and_fro", "sampler_speed", "attention_triton")


def rehearse(bench, name: str) -> dict:
    """What the check of that name finds in this process."""
    check = next(check for check in catalog.all_checks() if check.name == name)
    return resolve_name(f"gpu_checks.{check.function}")(bench, **check.arguments)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_found_to_be_so(bench, name):
    found = rehearse(bench, name)
    assert "skipped" not in found and found.get("tokens") == found.get("equal_tokens", found.get("tokens"))


def other_draw(draw):
    def drawn(logits, batch):
        found = draw(logits, batch)()
        found[0] = (found[0] + 1) % logits.shape[1]
        return lambda: found

    return drawn


def other_gradient(reference):
    def computed(*arguments):
        found = reference(*arguments)
        next(iter(found["gradients"].values())).view(-1)[0] += 1.0
        return found

    return computed


FAULTS = {  # check: what is replaced, by what, and what the check says of it
    "paged_attention_float32_16": (
        "gpu_checks.generation.reference_attention",
        lambda formula: lambda q, k, v, offset: formula(q, k, v, offset - 1),
        '"decode": .*"mixed": ',
    ),
    "layer_kernels_float32": (
        "rlhfuse.models.layers.decode_layer.add_norm",
        lambda add_norm: lambda *arguments: 1.1 * add_norm(*arguments),
        '"add_norm": 0.',
    ),
    "accumulation_float32": (
        "gpu_checks.layers.add_product",
        lambda _: lambda total, a, b: total.add_(a @ b, alpha=0.9),
        '"product": 0.',
    ),
    "fused_adam": (
        "rlhfuse.parallel.optimizer.ModelOptimizer.step",
        lambda step: lambda self, lr: step(self, 1.1 * lr),
        "weights",
    ),
    "sampler_parity": ("gpu_checks.sampling.device_draw", other_draw, '"other_tokens": 12'),
    "training_float32": ("gpu_checks.training.training_reference", other_gradient, "worst_gradient"),
    "nccl_captured": ("gpu_checks.nccl._recorded", lambda _: lambda bench, work: lambda: None, "different"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_wrong_is_found(bench, monkeypatch, name):
    place, fault, told = FAULTS[name]
    monkeypatch.setattr(place, fault(resolve_name(place)))
    with pytest.raises(CheckFailed, match=told):
        rehearse(bench, name)


def test_what_is_not_here_is_skipped_by_name(bench, monkeypatch):
    assert all("CUDA" in rehearse(bench, name)["skipped"] for name in ("flashinfer", "decode_8b_flashinfer"))
    assert "skipped" in rehearse(bench, "hangs")
    assert rehearse(bench, "transformer_engine")["skipped"] == "Transformer Engine runs on CUDA alone"
    monkeypatch.setattr("gpu_checks.layers.engine_obstacle", lambda *_: "")
    monkeypatch.setattr(build, "transformer_engine_slots", lambda rotary: build.local_slots(rotary, bench.where))
    assert rehearse(bench, "transformer_engine")["error"] == 0


@pytest.mark.parametrize("name", TIMED)
def test_what_training_does_is_timed(bench, name):
    found = json.loads(json.dumps(rehearse(bench, name)))
    assert all(one["seconds"] != 0 and one["bytes"] + one["flops"] >= 0 for one in found["figures"])


def test_decode_and_prefill_are_measured_on_a_tiny_shape(bench):
    found = speed.check_decode(bench, "8b")
    assert [one["name"] for one in found["figures"]] == ["decode tiny 1 x 40", "decode tiny 3 x 40", "prefill tiny"]
    assert all(one["seconds"] > 0 for one in found["figures"])
    assert found["verify"]["step_seconds"] > 0 and found["verify"]["over_decode_step"] > 0


def test_a_shape_too_large_for_the_card_is_skipped_by_name(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 << 30, 24 << 30))
    monkeypatch.setattr(Bench, "where", torch.device("cuda"))
    found = speed.check_decode(replace(bench, kind="cuda"), "8b")
    assert set(found) == {"skipped"} and "16384 MiB are free" in found["skipped"]


def test_what_a_step_reads_and_a_point_needs():
    small, large = (speed.spec_of(size) for size in ("1b", "8b"))
    assert 1.2e9 < small.parameters() < 1.3e9 and 8.0e9 < large.parameters() < 8.1e9
    assert speed.step_bytes(small, 0) == 2 * small.parameters()
    assert speed.step_bytes(large, 0) == 2 * (large.parameters() - 128256 * 4096)
    assert speed.step_bytes(large, 10) - speed.step_bytes(large, 0) == 10 * 32 * 2 * 8 * 128 * 2
    for points in (speed.SHORT, speed.LONG):  # on a card of 80 GB
        assert speed.needed_bytes(large, points, 16)[0] < 60e9


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
    "name", "shared_pipelines shared_cut resumed not_finite one_rank grpo kept nccl_speedup".split()
)
def test_whole_programs_are_rehearsed(call, name):
    code, report = call("--device", "cpu", "--names", f"{name}*")
    assert code == 0 and len(report["checks"]) > 1, report


@pytest.mark.gpu
def test_every_check_is_good_on_a_gpu(call):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    code, report = call(CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"))
    assert code == 0, [check for check in report["checks"] if not check["ok"]]
