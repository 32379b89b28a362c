"""scripts/gpu_check.sh without a GPU: what it says, how its checks are kept apart, which there are."""

import ast
import atexit
import inspect
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import gpu_check
import pytest
import run_comparison
import torch
from gpu_checks import catalog, isolation, migration
from gpu_checks import programs as whole_programs
from gpu_checks.isolation import Check
from gpu_checks.result import require
from run_comparison import Comparison, Difference
from testkit.paths import ROOT
from testkit.programs import eventually

from rlhfuse.base.errors import InputError
from rlhfuse.parallel.device import choose_device

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
    assert found == [*(f"stage_{tokens}" for tokens in (500, 1024, 2048, 4096, 8192)), "head_8192"]
    assert gpu_check.chosen(every, "") == every
    with pytest.raises(InputError, match="--names decod_8b: no check is called so; the nearest is decode_8b"):
        gpu_check.chosen(every, "hangs,decod_8b")


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
    assert before <= 150 and names[1:4] == ["host", "rates", "kernels_8192"]  # figures first
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


def test_a_digest_of_bits_is_a_difference_without_a_size(monkeypatch, tmp_path):
    """No bits are promised on a GPU: other ones are told, and how far numbers are apart is said by the numbers."""
    found = (
        Difference("iteration 1 rollout/digest", "ab12", "cd34"),
        Difference("iteration 1 actor/loss", "1.0", "1.5"),
    )
    monkeypatch.setattr(run_comparison, "compare_runs", lambda a, b: [Comparison("metrics", 9, found)])
    told = whole_programs.differences(tmp_path, tmp_path)
    assert told["different"] == 2 and not told["bit_equal"]
    assert (told["worst_metric"], told["relative_difference"]) == ("iteration 1 actor/loss", pytest.approx(1 / 3))


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
