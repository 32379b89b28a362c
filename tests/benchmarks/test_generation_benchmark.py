"""The generation benchmark as its users run it, in small and without vLLM: output, workers, bad input."""

import json
import sys
import time
from pathlib import Path

import generation  # noqa: E402
import pytest
from benchmark_run import check_refused, run
from generation_cases import QUICK, product_shapes, step_bytes, step_flops, trace_lengths  # noqa: E402
from generation_peers import OWN, Configuration, Fleet, Worker, choose, ratios  # noqa: E402
from rich.console import Console

from rlhfuse.errors import InputError  # noqa: E402


@pytest.fixture
def trace(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"9,{10 + i % 7 * i}\n" for i in range(60)))
    return file


@pytest.fixture
def model(tmp_path):
    return generation.write_models(tmp_path, QUICK, quick=True, seed=1)["small"]


def fleet(tmp_path, *peers):
    return Fleet({peer: sys.executable for peer in peers}, 1, 3, tmp_path, Console(stderr=True))


@pytest.mark.slow
def test_quick_run_measures_every_case(tmp_path, trace):
    files = ("--plot", tmp_path / "curves.png", "--out", tmp_path / "speed.json")
    finished = run("generation.py", "--quick", "--threads", 1, "--trace", trace, *files)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("\n") == 1, "stdout holds one JSON object"
    result = json.loads(finished.stdout)
    assert json.loads((tmp_path / "speed.json").read_text()) == result
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert set(result["left_out"]) == {"vllm"} and "vllm is left out" in finished.stderr
    assert result["goals"] == [], "a quick run is no measurement"
    cases = result["cases"]
    assert list(cases) == ["A", "B", "C", "D", "E", "F"]
    for case in "AB":
        engines, (peer,) = cases[case]["engines"], cases[case]["ratios"].items()
        assert set(engines) == {"rlhfuse", "transformers"} and peer[0] == "transformers"
        assert peer[1]["ratio"] == pytest.approx(engines["transformers"]["seconds"] / engines["rlhfuse"]["seconds"])
    assert cases["A"]["tokens"] == QUICK.sequences * QUICK.response_tokens
    assert cases["B"]["lengths"]["max"] == QUICK.context - QUICK.prompt_tokens
    assert 0 < cases["A"]["gemm_only"]["fraction_reached"]["rlhfuse"]
    assert [row["batch"] for row in cases["C"]["rows"]] == [1, 2]
    assert 0 < cases["D"]["rows"][0]["share_outside"] < 1 and cases["D"]["rows"][0]["profile"]
    assert [row["batch"] for row in cases["E"]["rows"]] == [1, 4]
    assert [point["context"] for point in cases["F"]["by_context"]] == list(QUICK.contexts)
    assert [point["batch"] for point in cases["F"]["by_batch"]] == list(QUICK.batches)


def test_idle_engines_take_no_cpu_and_turns_change(tmp_path, model):
    with fleet(tmp_path, OWN, "limits") as engines:
        choose(engines, model, None)
        workers = {peer: engines.worker(peer, model) for peer in engines.pythons}
        before = workers[OWN].cpu_seconds()
        order = []

        def request(peer, number):
            order.append((number, peer))
            return PRODUCTS if peer == "limits" else SHORT

        answers = engines.rounds(workers, request, count=2)
        assert workers[OWN].cpu_seconds() > before
        for worker in workers.values():
            come_to_rest(worker)
        pids = [worker._process.pid for worker in workers.values()]
    assert [len(rows) for rows in answers.values()] == [2, 2]
    assert [turn for turn in order if turn[0] == 0] == [(0, OWN), (0, "limits")]
    assert [turn for turn in order if turn[0] == 1] == [(1, "limits"), (1, OWN)]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "closed with the fleet"


def come_to_rest(worker):
    """Returns once the worker has used no CPU for half a second; one that spins never lets it."""
    used = None
    while (now := worker.cpu_seconds()) != used:
        used = now
        time.sleep(0.5)


PRODUCTS = {"do": "products", "shapes": [[8, 4]], "rows": 2, "repeats": 1, "seed": 1}
SHORT = {"do": "generate", "prompts": [[9, 10, 11]], "lengths": [4], "at_once": 1, "seed": 1}


def test_trial_chooses_what_runs_and_says_what_does_not(tmp_path, model, monkeypatch):
    bad = Configuration("broken", {"block_tokens": 0, "max_batched_tokens": 64})
    good = Configuration("good", {"block_tokens": 16, "max_batched_tokens": 64})
    monkeypatch.setattr("generation_peers.candidates", lambda *_: [bad, good])
    with fleet(tmp_path, OWN) as engines:
        tried = choose(engines, model, lambda kind, number: SHORT)
        assert engines.chosen[OWN] == {"many": good, "few": good, "any": good}
    broken, fine = tried[OWN]
    assert "failed" in broken and "many" not in broken
    assert fine["many"] > 0 and fine["few"] > 0


def test_an_engine_that_fails_is_heard(tmp_path, model):
    with fleet(tmp_path, OWN) as engines:
        choose(engines, model, None)
        worker = engines.worker(OWN, model)
        assert isinstance(worker, Worker)
        with pytest.raises(RuntimeError, match="not an id in"):
            worker.ask(**{**SHORT, "prompts": [[10**6]]})


def test_figures_by_hand(model, trace):
    spec = model.spec
    assert product_shapes(spec)[:4] == [(512, 256), (256, 256), (1376, 256), (256, 688)]
    assert len(product_shapes(spec)) == 6 * 4 + 1
    linear = 6 * (512 * 256 + 256 * 256 + 1376 * 256 + 256 * 688) + 512 * 256
    norms = (2 * 6 + 1) * 256
    assert step_bytes(spec, 0, 0) == 4 * (linear + norms)
    assert step_bytes(spec, 2, 9) - step_bytes(spec, 0, 0) == 2 * (4 * 256 + 10 * 2 * 6 * 2 * 64 * 4)
    assert step_flops(spec, 3, 0) == 3 * 2 * linear
    assert step_flops(spec, 1, 5) - step_flops(spec, 1, 0) == 4 * 6 * 4 * 64 * 5
    lengths = trace_lengths(trace, 50, 200, seed=1)
    assert len(lengths) == 50 and max(lengths) == 200 and min(lengths) >= 1
    assert lengths == trace_lengths(trace, 50, 200, seed=1) != trace_lengths(trace, 50, 200, seed=2)
    answers = {OWN: [{"s": 1.0}, {"s": 2.0}, {"s": 4.0}], "vllm": [{"s": 3.0}, {"s": 3.0}, {"s": 4.0}]}
    assert ratios(answers, "s") == {"vllm": {"ratio": 1.5, "least": 1.0, "most": 3.0}}
    with pytest.raises(InputError, match="60 requests, 100 are needed"):
        trace_lengths(trace, 100, 200, seed=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "A,G"], "'G' is not a case"),
        (["--peers", "sglang"], "'sglang' is unknown"),
        (["--vllm-python", "/nowhere/python"], "/nowhere/python is not there"),
        (["--cases", "B", "--trace", "/nowhere.csv"], "--trace /nowhere.csv is not there"),
        (["--cases", "A", "--plot", "x.png"], "draws case F"),
        (["--rounds", "0"], "0 is not at least 1"),
    ],
)
def test_bad_input_exits_2(arguments, message):
    check_refused(message, "generation.py", *arguments)
