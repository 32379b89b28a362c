"""tools/plan.py: its two forms, its search, placements after the plan, and nothing on the way but a line of error."""

import json

import pytest
from testkit.llama3 import llama3
from testkit.paths import ROOT
from testkit.programs import call_tool
from testkit.search_cases import table_of
from testkit.tiny import write_tokenizer

from rlhfuse.config.load import load_config, read_specs
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.ir.problem import load_problem


def plan(run_yaml, *words: object, **variables: str):
    return call_tool("plan", "--config", run_yaml, *words, **variables)


def test_text_and_json(run_yaml):
    text = plan(run_yaml).stdout
    assert "plan for 4 ranks" in text and "64 samples per iteration" in text
    raw = plan(run_yaml, "--json", "rollout.samples_per_prompt=8")
    assert json.loads(raw.stdout)["batch"]["samples"] == 128


def test_models_of_config_json_alone_are_compared_by_size_in_one_line(run_yaml, tmp_path):
    other, text = tmp_path / "other", (tmp_path / "model/config.json").read_text()
    other.mkdir()
    (other / "config.json").write_text(text)
    named = json.loads(text)
    (tmp_path / "model/config.json").write_text(json.dumps(named | {"eos_token_id": None}))
    done = plan(run_yaml, f"reward.path={other}", "fusion.intra_stage=false")
    assert done.returncode == 0 and "ends at the tokenizer's end token, as the model's files name none" in done.stdout
    line = "without tokenizer files actor and reward are compared by the size of their vocabularies alone, 512 each; "
    assert done.stderr.count(line + "a run needs the files\n") == 1
    (other / "config.json").write_text(text.replace("512", "448", 1))
    done = plan(run_yaml, f"reward.path={other}")
    assert done.returncode == 2 and "vocab(448) != vocab(512) of the actor" in done.stderr


def test_plans_take_hub_names(run_yaml, tmp_path, monkeypatch):
    """As they lie in the cache of the hub; nothing is fetched here."""
    place = tmp_path / "hub" / "models--someone--small"
    (place / "snapshots" / "0123").mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123")
    (place / "snapshots" / "0123" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    names = [f"{role}.path=someone/small" for role in ("actor", "critic", "reward")]
    assert read_specs(load_config(run_yaml, names)) == read_specs(load_config(run_yaml))
    done = plan(run_yaml, "--json", "fusion.intra_stage=false", *names)
    assert done.returncode == 0 and json.loads(done.stdout)["ranks"]["count"] == 4, done.stderr
    done = plan(run_yaml, "actor.path=someone/other")
    assert done.returncode == 2 and "actor.path=someone/other" in done.stderr


def test_the_length_of_prompts_is_read_off_them(run_yaml, tmp_path):
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w1 w2"}\n{"prompt": "w1 w2 w3 w4"}\n')
    here = f"data.train_files=[{tmp_path}/prompts.jsonl]"
    done = plan(run_yaml, "--json", here, "data.max_prompt_tokens=auto", "fusion.intra_stage=false")
    found = json.loads(done.stdout)
    assert found["generation"]["limits"]["max_prompt_tokens"] == 5 and "the longest prompt" in found["reasons"][0]


def test_layouts_that_are_auto_are_searched_and_told(run_yaml, tmp_path):
    words = ("--json", "fusion.intra_stage=false", "parallel=auto", "--world-size", "4")
    done = plan(run_yaml, *words, "fusion.actor_microbatches=auto")
    found = json.loads(done.stdout)
    layouts = {task["name"]: task.get("layout") for task in found["iteration"]["tasks"]}
    chosen = next(line for line in done.stderr.splitlines() if line.startswith("layouts of the search: "))
    assert f"generation={layouts['generation']} " in chosen and f"actor_train={layouts['actor_train']} " in chosen
    assert f"microbatch_tokens={found['batch']['cut']['tokens']:.0f}" in chosen
    assert any(reason.startswith("lengths are assumed: responses lognormal") for reason in found["reasons"])
    (tmp_path / "past.csv").write_text("output_tokens\n3\n40\n")
    done = plan(run_yaml, *words, "--lengths", f"{tmp_path}/past.csv")
    assert f"2 samples of parallel.lengths={tmp_path}/past.csv" in done.stdout


@pytest.mark.parametrize(
    "words, environment, message",
    [
        ("--world-size 8", {}, "dp(4) * tp(1) * pp(1) = 4 != world_size(8)"),
        ("", {"WORLD_SIZE": "2"}, "!= world_size(2)"),
        ("", {"WORLD_SIZE": "many"}, "WORLD_SIZE='many' is no number"),
        ("--lengths none.csv", {}, "none.csv does not exist"),
        ("parallel=auto", {}, "parallel.actor_train=auto: the number of ranks is not known; start under torchrun"),
        ("data.max_prompt_tokens=auto", {}, "has no tokenizer files; set actor.tokenizer to a folder that has them"),
        ("--problem /none/problem.json", {}, "cannot write /none/problem.json"),
        # a search's options, and what does not go together
        ("--top 3", {}, "--top is of a search; add --search"),
        ("--best best.yaml", {}, "--best is of a search; add --search"),
        ("--search --problem problem.json", {}, "--problem is of one plan, --search of many"),
        ("--search --top 0", {}, "--top 0 shows nothing; give 1 or more"),
        ("--search --best /none/best.yaml", {}, "cannot write /none/best.yaml"),
        ("--search trainer.memory_limit_gb=0.01", {}, "lacks"),
        ("--search parallel.generation=d2t1p1", {}, "parallel.generation=d2t1p1: dp(2)"),
    ],
)
def test_bad_input_exits_2_with_one_line(run_yaml, words, environment, message):
    done = plan(run_yaml, *words.split(), **environment)
    assert done.returncode == 2 and done.stdout == ""
    compiling = ("compiling ", "compiled ")  # kernels, in a new clone
    said = [line for line in done.stderr.splitlines() if not line.startswith(compiling)]
    assert len(said) == 1 and message in said[0]


def test_the_problem_of_the_schedule_is_written_for_the_search(run_yaml, tmp_path):
    path = tmp_path / "problem.json"
    assert plan(run_yaml, "--problem", path, "--json").returncode == 0
    problem = load_problem(path)
    assert [pipeline.name for pipeline in problem.pipelines] == ["actor", "critic.0", "critic.1"]
    assert problem.pipeline("critic.1").placement == (3, 2)
    assert problem.pipeline("actor").split and len(problem.pipeline("actor").weight_activation or ()) == 4


def test_what_its_work_costs_is_written_for_a_paced_run(run_yaml, tmp_path):
    """The same prices, where lines hold them: a plan of the run that is paced by itself."""
    whole = ("fusion.split_backward=false", "rollout.draft_rows=0", "fusion.actor_microbatches=2", "trainer.device=cpu")
    plans = []
    for words in (("--pace", tmp_path / "pace.json"), (f"trainer.pace={tmp_path / 'pace.json'}",)):
        shown = call_tool("plan", "--config", run_yaml, *whole, *words, "--json")
        assert shown.returncode == 0, shown.stderr
        plans.append(PlanReport.from_dict(json.loads(shown.stdout)))
    own, paced = plans
    assert paced.ranks.paced.endswith(" on 4 cpu, x1") and not own.ranks.paced
    assert [move.seconds for move in paced.weight_moves] == [move.seconds for move in own.weight_moves]
    assert paced.schedule.lower_bound_seconds == pytest.approx(own.schedule.lower_bound_seconds, rel=0.05)
    assert paced.seconds.gen_infer_serial == pytest.approx(own.seconds.gen_infer_serial, rel=0.15)
    refused = call_tool("plan", "--config", run_yaml, "--search", "--pace", "x")
    assert refused.returncode == 2 and "--pace is of one plan, --search of many" in refused.stderr


def test_kernels_are_compiled_before_the_search_begins(programs, run_yaml, tmp_path):
    """On a fresh clone the search has its whole time, and a line says what came before it."""
    begin = ("plan", "--config", run_yaml, "--json", "fusion.actor_microbatches=4")
    done, again = (programs.tool(*begin, NUMBA_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    source = json.loads(done.stdout)["schedule"]["source"]
    assert int(source.split(" moves")[0].split()[-1]) > 1000, source
    said = [line.split()[0] for line in done.stderr.splitlines()]
    assert said == ["compiling", "compiled"] * 2  # the simulator's, and the search's
    assert again.returncode == 0 and not again.stderr


# --search


def test_the_best_tables_are_shown_with_the_proof_and_the_same_bytes_every_time(programs, run_yaml):
    words = ("plan", "--config", run_yaml, "--search", "--top", 3)
    first, again = (programs.tool(*words, PYTHONHASHSEED=seed) for seed in "12")
    assert first.returncode == 0, first.stderr
    *lines, elapsed = first.stdout.splitlines()
    assert lines == again.stdout.splitlines()[:-1] and elapsed.startswith("CPU time: ")
    assert lines[0].startswith("searched ") and " on 4 cpu" in lines[0]
    assert "lengths are assumed" in lines[1]
    assert "none that was reached is faster than these" in lines[3] and "none takes less, however it" in lines[4]
    head = next(number for number, line in enumerate(lines) if line.split()[:2] == ["seconds", "bound"])
    rows = [line.split() for line in lines[head + 1 : head + 4]]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert sorted(float(row[1]) for row in rows) == [float(row[1]) for row in rows]


def test_wishes_memory_and_doubts_are_told_and_drawn(run_yaml, tmp_path):
    small = ("rollout.prompts_per_iteration=4", "rollout.samples_per_prompt=1", "--world-size", "2")
    done = plan(run_yaml, "--search", *small, "--draw", tmp_path / "curve.png")
    told = ("if you insist on", "memory against time, ", "sure of")
    assert [words for words in told if words not in done.stdout] == []
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    raw = json.loads(plan(run_yaml, "--search", *small, "--json").stdout)
    assert raw["wishes"] and raw["memory"][0]["seconds"] == raw["tables"][0]["seconds"]


def test_what_an_argument_gives_stays(run_yaml):
    done = plan(run_yaml, "--search", "--json", "parallel.generation=d2t2p1", "trainer.recompute=full")
    tables = [table_of(table["overrides"]) for table in json.loads(done.stdout)["tables"]]
    assert {(str(table.generation), table.recompute) for table in tables} == {("d2t2p1", "full")}
    assert len({table.text for table in tables}) == 5


def test_the_best_is_written_as_a_run(run_yaml, tmp_path):
    file = tmp_path / "best.yaml"
    found = json.loads(plan(run_yaml, "--search", "--json", "--best", file, "parallel.headroom=0.2").stdout)
    best, *others = found["tables"]
    assert found["world_size"] == 4 and len(others) == 4
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"])
    config, table = load_config(file), table_of(best["overrides"])
    assert table.of(config) == config and config.parallel.headroom == 0.2
    whatever = ["parallel.headroom=0.2", "parallel.reward_inference=d1t4p1"]  # whatever layouts the file has
    assert config == load_config(run_yaml, [*whatever, *best["overrides"]])
    found = json.loads(plan(file, "--json", "--world-size", "4").stdout)
    layouts = {task["name"]: task.get("layout") for task in found["iteration"]["tasks"]}
    assert layouts["generation"] == str(table.generation) and layouts["actor_train"].startswith(str(table.actor_train))
    assert table.cut.name == "microbatch_tokens" and table.cut.value >= found["batch"]["cut"]["tokens"]


def test_the_command_that_is_named_prints_the_plan_of_the_best(run_yaml):
    told = plan(run_yaml, "--search").stdout.splitlines()
    line = next(line for line in told if line.startswith("plan of the best: "))
    option, file, *words = line.split("tools/plan.py ")[1].split()
    assert option == "--config" and "plan for 4 ranks" in plan(file, *words, "fusion.search_seconds=0.2").stdout


# --what-if

EIGHT = ROOT / "examples/llama3_8b_8gpus.yaml"
SMALL = ("rollout.prompts_per_iteration=64", "fusion.actor_microbatches=8", "fusion.intra_stage=serial")


@pytest.fixture
def on_eight(tmp_path):
    """A caller of the tool with models of a config.json alone, in an order that is not searched."""
    folder = llama3(tmp_path, "8B")
    return lambda *words: plan(EIGHT, f"actor.path={folder}", f"reward.path={folder}", *SMALL, *words)


def test_placements_follow_the_plan(on_eight):
    done = on_eight("--what-if")
    plan_alone, _, told = done.stdout.partition("\nwhat if: ")
    assert plan_alone == on_eight().stdout.rstrip("\n") and "what if: pricing generation" in done.stderr
    rows = [line.split("  ")[1] for line in told.splitlines() if line.startswith("  ") and line[2] != " "]
    assert rows[:4] == ["placement", "colocated, fused", "colocated, serial", "split training"]
    fused, serial = (line for line in told.splitlines() if line.startswith("  colocated, "))
    assert float(fused.split()[2]) == pytest.approx(seconds_of(plan_alone), rel=1e-3) and " 1.00 " in fused
    assert "@0-7 generation d" in serial
    assert told == on_eight("--what-if").stdout.partition("\nwhat if: ")[2]  # nothing is random


def seconds_of(told: str) -> float:
    """Fused, of an iteration, without what is said of CUDA graphs."""
    lines = {line[2:26].strip(): line.split() for line in told.splitlines()}
    graphs = float(lines["CUDA graphs recorded"][-1]) if "CUDA graphs recorded" in lines else 0.0
    return float(lines["iteration"][2]) - graphs


@pytest.mark.parametrize("words", [(), ("--search",)])
def test_a_run_without_room_is_refused_beside_its_placements(on_eight, words):
    """Whoever has no room where all tasks are on all ranks needs to see others most."""
    words = (*words, "--what-if", "trainer.offload_optimizer=false", "parallel.headroom=0")
    done = on_eight(*words, "trainer.memory_limit_gb=24")
    refusal = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and refusal.startswith("error: memory: ")
    assert done.stdout.startswith("what if: ") and refusal[7:47] in done.stdout
    raw = json.loads(on_eight(*words, "trainer.memory_limit_gb=24", "--json").stdout)["what_if"]
    assert raw["today_seconds"] is None and all(row["bound"] for row in raw["placements"])
    assert all(f" {row['bound']:.4g} " in done.stdout for row in raw["placements"])
    nowhere = on_eight(*words, "trainer.memory_limit_gb=12")
    assert nowhere.returncode == 2 and "; anywhere else: critic_train of 8 ranks" in nowhere.stderr


def test_machines_of_two_kinds_and_a_cpu(on_eight, run_yaml):
    over = ["trainer.hardware=a100:8,h100:8", "rollout.prompts_per_iteration=64", "algorithm.minibatches=2"]
    over += [f"parallel.{task}_train=d4t1p4" for task in ("actor", "critic")]
    over += ["parallel.generation=d8t2p1", "parallel.inference=d8t2p1", "fusion.actor_microbatches=8"]
    raw = json.loads(on_eight(*over, "--what-if", "--json").stdout)
    assert raw["ranks"]["hardware"] == "a100:8,h100:8" and raw["ranks"]["count"] == 16 and raw["efficiency"] is None
    assert raw["memory"]["limit_source"] == "of the smallest of a100:8,h100:8"
    split = next(row for row in raw["what_if"]["placements"] if row["name"] == "split training")
    assert {tuple(split["calls"][name]["ranks"]) for name in ("actor_train", "critic_train")} == {(0, 7), (8, 15)}
    refused = on_eight("trainer.hardware=a100:4,h100:4")
    assert refused.returncode == 2 and not refused.stdout
    assert refused.stderr.startswith("error: trainer.hardware: a100:4,h100:4: 4 of a100 are no whole machines of 8")
    assert "!= world_size(8)" in on_eight("trainer.hardware=a100:8,h100:8").stderr
    on_a_cpu = plan(run_yaml, "--what-if", "fusion.intra_stage=serial").stdout
    assert "critic across iterations" in on_a_cpu and "@2-3 " in on_a_cpu
