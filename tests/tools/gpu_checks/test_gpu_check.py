"""scripts/gpu_check.sh without a GPU: what it says, how its checks are kept apart, which there are."""

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
from gpu_checks import catalog, isolation, migration
from gpu_checks.isolation import Check
from gpu_checks.result import require
from testkit.programs import eventually

from rlhfuse.base.errors import InputError

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
        gpu_check.chosen(every, "rates,decod_8b")


def test_checks_for_more_gpus_than_there_are_are_refused_where_they_are_all_that_is_asked_for(session):
    checks = [replace(made_up(fine, f"on_{gpus}"), gpus=gpus) for gpus in (2, 4)]
    report, code = session(*checks, names="on_*")
    assert code == 0 and [check["name"] for check in report["checks"]] == ["probe", "on_2"]
    with pytest.raises(InputError, match="--names on_4: needs 4 GPUs, here are 2"):
        session(*checks, names="on_4")


# the catalogue


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
