"""Whole runs of two ranks (testkit/runs_table.py): fused is serial, in whatever order and after whatever restart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from run_report.forecast import Forecaster
from run_report.report import render_report
from run_report.run_files import RunFiles, load_trace
from safetensors.torch import load_file, save_file
from testkit.paths import ROOT
from testkit.programs import call_tool
from testkit.runs_table import FUSED, TABLE, in_the_checkout, metrics_of, plan_of, printed, stages
from testkit.tiny import write_checkpoint, write_run, write_tokenizer

from rlhfuse.monitor.samples import read_samples
from rlhfuse.schedule.io import load_schedule


def marked_slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


EQUAL = [
    "ppo serial",
    "grpo serial",
    "mixed serial",
    "stopped serial",
    "by sample serial",
    "on wide workers serial",
    "warm resumed",
    "spared resumed",
    "cut, backwards whole",
    *marked_slow("rloo serial", "reinforce serial", "steered resumed", "another order"),
]


@pytest.mark.parametrize("name", EQUAL)
def test_it_is_the_other_run_bit_for_bit(runs, name):
    """Fused and serial, uninterrupted and resumed, in another order or with backwards in parts."""
    assert all(row["rollout/train_logprob_abs_diff"] < 1e-5 for row in metrics_of(runs[name]))


FILTERED = ["filtered serial", "filtered in rounds", "filtered resumed", "filtered beside a model, serial"]
FILTERED += marked_slow("filtered one by one, serial", "filtered on tensor ranks, in rounds")


@pytest.mark.parametrize("name", FILTERED)
def test_which_groups_are_taken_depends_on_scores_alone(runs, name):
    rows = metrics_of(runs[name])
    assert sum(row["training/filter_groups/evicted_samples"] for row in rows) > 0
    assert all(row["training/filter_groups/places"].count("A") == 4 for row in rows)
    assert all(row["training/filter_groups/num_gen_batches"] >= 1 for row in rows)
    page = render_report(RunFiles.read(runs[name]))
    assert "groups taken" in page and rows[-1]["training/filter_groups/places"] in page


def test_the_next_iteration_draws_on_behind_the_last_group_that_was_taken(runs):
    run = runs["filtered resumed"]
    drawn = [row["training/filter_groups/places"].rindex("A") + 1 for row in metrics_of(run)]
    manifest = json.loads((run / "checkpoints/iteration-1/manifest.json").read_text())
    assert manifest["state"]["position"]["prompts_drawn"] == drawn[0] and max(drawn) > 4


def test_too_few_groups_that_differ_are_filled_up_or_end_the_run(runs):
    assert all(row["critic/advantages/max"] == 0 for row in metrics_of(runs["filled"]))
    first = TABLE["filled"].first
    told = runs.start("short", f"{first} algorithm.filter_groups.on_shortage=error", errors=True)
    assert len(set(told)) == 1 and told[0].startswith("JointError: algorithm.filter_groups: scores differ in 0 of 8 ")


def test_a_run_leaves_what_it_promises(runs):
    run = runs["ppo"]
    for name in ("config.yaml", "plan.json", "schedule.json", "metrics.jsonl", "trace.json", "costs.json"):
        assert (run / name).stat().st_size > 0
    metrics = metrics_of(run)
    assert [row["iteration"] for row in metrics] == [0, 1]
    assert all(row["fusion/migrated_samples"] >= 1 for row in metrics_of(runs["ppo of another seed"]))
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"measured"}


def test_it_says_what_it_does_with_its_settings(runs):
    """With responses of one token, the one that their prompts' prefill gives, no step decodes."""
    settings = "trainer.keep_checkpoints=3 trainer.iterations=3 rollout.max_response_tokens=1"
    ((said,), _) = runs.start("without a decode step", settings, FUSED, watch=printed)
    assert "R_t = 8: fusion.threshold says so" in said and "warning: costs" not in said, said
    assert said.count("warning: without effect here: trainer.keep_checkpoints=3") == 1
    assert len(metrics_of(runs.folder / "without a decode step")) == 3


def test_little_sums_are_trained_and_evaluated(runs):
    """The example, end to end but short: a function reward, held-out sums, and the report of both."""
    short = "trainer.iterations=2 trainer.eval_every=1 rollout.prompts_per_iteration=4 trainer.export=false"
    runs.start("sums", short, config=ROOT / "examples" / "sums_grpo.yaml", watch=in_the_checkout)
    rows = metrics_of(runs.folder / "sums")
    assert [row["iteration"] for row in rows] == [-1, 0, 1]
    assert all(row["val/samples"] == 512 for row in rows) and 0.3 < rows[0]["val/score/mean"] < 0.45
    trained = [row["critic/score/mean"] for row in rows[1:]]
    assert all(0 < score < 1 and score * 32 == round(score * 32) for score in trained)
    page = render_report(RunFiles.read(runs.folder / "sums"))
    assert "held-out prompts" in page and f"{rows[0]['val/score/mean']:+.3f}" in page


def test_the_export_loads_in_transformers_with_the_trained_weights(runs):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    from rlhfuse.gen.engine import Engine, SamplingParams

    export = runs["ppo"] / "export"
    actor = AutoModelForCausalLM.from_pretrained(export / "actor", dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(export / "critic", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(runs.folder / "actor", dtype=torch.float32)
    assert critic.score.weight.shape == (1, 64)
    assert not torch.equal(actor.lm_head.weight, before.lm_head.weight)
    assert AutoTokenizer.from_pretrained(export / "actor")("w3")["input_ids"] == [1, 6]
    engine = Engine.from_pretrained(export / "actor")
    result = engine.generate([[1, 5, 9, 20]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0]
    logits = actor(torch.tensor([[1, 5, 9, 20, *result.tokens]])).logits[0]
    chosen = logits[3:-1].log_softmax(-1).gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    # greedy log-probabilities are those of the distribution itself
    assert torch.allclose(chosen, torch.tensor(result.logprobs), atol=1e-5)


def test_work_of_a_paced_run_lasts_as_long_as_its_file_says(runs):
    """Twice as long, with the stretch; values are those of the run that takes its own time."""
    run = runs["ppo paced"]
    costs, plan = json.loads((run / "costs.json").read_text()), plan_of(run)
    assert plan["ranks"]["paced"] == "round numbers, x2" and not any("perf/mfu" in key for key in metrics_of(run)[0])
    for row in metrics_of(run):
        assert row["paced"].startswith("round numbers, x2: ") and row["paced/pieces"] > 40
        assert 0 <= row["paced/late_share"] <= 1 and row["paced/largest_lateness_seconds"] >= 0
        assert 0 < row["paced/cpu_share"] and 0 < row["paced/python_share"] <= 1 and row["paced/python_seconds"] > 0
        assert row["timing_s/reshard"] >= 2 * 0.05 and row["fusion/makespan_measured_seconds"] >= 2 * (2 * 0.06 + 0.2)
        assert row["timing_s/gen"] >= 11 * 0.02, "a step for each token after the first"
    assert costs["decode"]["constant"] + costs["decode"]["slopes"][0] >= 0.019 and costs["swap_in"] >= 0.02
    assert costs["score"]["constant"] + 99 * costs["score"]["slopes"][0] >= 0.04
    spans = load_trace(run / "trace.json")
    moved, decoded = ([span for span in spans if span.kind == kind] for kind in ("critic_move", "generate"))
    assert {span.rank for span in moved} == {0, 1}
    for span in moved:  # beneath generation
        assert span.end_seconds - span.start_seconds >= 2 * 0.05
        own = [one for one in decoded if one.rank == span.rank]
        assert any(one.start_seconds < span.end_seconds and span.start_seconds < one.end_seconds for one in own)
    assert "Paced run: its times are no measurement of hardware." in render_report(RunFiles.read(run))


@pytest.mark.parametrize("other, code", [("ppo serial", 0), ("ppo of another seed", 1)])
def test_the_tool_tells_runs_apart(runs, other, code):
    compared = call_tool("compare_runs", runs["ppo"], runs[other])
    assert compared.returncode == code, compared.stdout + compared.stderr


def test_samples_that_were_cut_do_not_count(runs):
    """Others stop by themselves, and half of their tokens train."""
    rows = metrics_of(runs["by sample"])
    assert all(0 < row["response_length/clip_ratio"] < 1 and row["actor/entropy"] > 4 for row in rows), rows
    assert any(row["actor/grad_norm"] > 0 for row in rows)


def test_grpo_trains_without_a_critic(runs):
    run = runs["grpo"]
    assert [folder.name for folder in (run / "export").iterdir()] == ["actor"]
    metrics = metrics_of(run)
    assert all(0 <= row["critic/score/mean"] <= 1 for row in metrics)
    assert metrics[0]["actor/kl_loss"] >= 0 and not {"critic/vf_loss", "critic/values/mean"} & metrics[0].keys()
    assert metrics[0]["actor/kl_coef"] == 0.05 > metrics[1]["actor/kl_coef"]  # it was below its target
    models = [task["name"] for task in plan_of(run)["iteration"]["tasks"] if "layout" in task]
    assert models == ["actor_move", "generation", "reference_inference", "actor_train", "evaluation"]


def test_samples_without_gradient_are_left_out_and_the_next_plan_knows_it(runs):
    run = runs["spared"]
    rows = metrics_of(run)
    for row in rows:
        zero, left_out = row["lengths/zero_gradient"], row["training/zero_gradient/samples"]
        assert zero[::2] == zero[1::2] and 0 < sum(zero) < len(zero) and 0 < left_out <= sum(zero) / len(zero)
        assert 0 < row["training/zero_gradient/tokens"] < 1 and row["actor/grad_norm"] > 0
    found = Forecaster(RunFiles.read(run)).forecast(1)
    assert found.seconds["train"] > 0
    settings = f"{TABLE['spared'].first} parallel.lengths={run}".replace("{folder}", str(runs.folder)).split()
    told = call_tool("plan", "--config", runs.config, *settings)
    assert told.returncode == 0 and f"these: {share_of(rows)} of the samples" in told.stdout, told.stderr
    knows = {"spared": "it is not known", "spared resumed": f"these: {share_of(rows[:1])} of the samples"}
    for name, part in knows.items():
        (line,) = [line for line in plan_of(runs[name])["reasons"] if "skip_zero_gradients" in line]
        assert part in line, "a run that is resumed knows its past"


def share_of(rows) -> str:
    flags = [flag for row in rows for flag in row["lengths/zero_gradient"]]
    return f"{sum(flags) / len(flags):.1%}"


def test_a_slow_reward_function_is_measured_and_predicted(runs):
    """Its calls take a thousand seconds by their own clock: they alone say how long generation and inference take."""
    run = runs["grpo"]
    cost, row = json.loads((run / "costs.json").read_text())["reward"], metrics_of(run)[1]
    assert cost["seconds"] == pytest.approx(1000, rel=0.1) and cost["at_once"] == 2  # a call has a prompt's samples
    assert 0 < row["timing_s/reward"] <= row["timing_s/infer"]
    assert {span.rank for span in load_trace(run / "trace.json") if span.kind == "reward"} == {0, 1}
    timeline = Forecaster(RunFiles.read(run)).forecast(1).timeline
    assert 0.9 * timeline.total_seconds < timeline.reward_seconds < timeline.total_seconds
    assert timeline.total_seconds > 900


def test_a_mixed_reward_is_the_sum_of_its_parts(runs):
    run = runs["mixed"]
    for role in ("actor", "critic"):
        exported, given = (
            folder / "tokenizer_config.json" for folder in (run / "export" / role, runs.folder / "tokenizer")
        )
        assert exported.read_bytes() == given.read_bytes()
    (row,) = metrics_of(run)
    assert row["critic/values/mean"] == 0, "a critic that begins as the actor has a value head of zeros"
    mixed = 0.5 * row["reward/model/mean"] + 2 * row["reward/function/mean"]
    assert row["critic/score/mean"] == pytest.approx(mixed, rel=1e-5)
    assert row["critic/vf_loss"] > 0 and row["actor/pg_clipfrac_lower"] >= 0


@pytest.mark.slow
def test_nothing_scores_but_the_function_and_what_steers_moves(runs):
    for name in ("rloo", "reinforce"):
        assert [folder.name for folder in (runs[name] / "export").iterdir()] == ["actor"]
        assert "actor/ref_kl" not in metrics_of(runs[name])[0]
    for name in ("actor/kl_coef", "critic/score_scale"):
        assert len({row[name] for row in metrics_of(runs["steered"])}) == 3, name


def actor_in(checkpoint: Path) -> dict:
    """Tensors of the actor in a checkpoint's files, by file and name."""
    files = sorted(checkpoint.glob("*.safetensors"))
    return {(file.name, key): w for file in files for key, w in load_file(file).items() if "actor" in key}


def test_the_critic_warms_up_alone(runs):
    """The actor is held still, every bit of it; then its own schedule begins."""
    before, after, moved = (actor_in(runs["warm"] / "checkpoints" / f"iteration-{n}") for n in (1, 2, 3))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert not any("exp_avg" in name for _, name in after), "a held actor has no moments yet"
    assert any(not torch.equal(moved[key], after[key]) for key in after)
    assert any("exp_avg" in name for _, name in moved)
    metrics = metrics_of(runs["warm"])
    assert [row["actor/lr"] for row in metrics] == pytest.approx([0, 0, 1e-3, 5e-4])
    assert [row["critic/lr"] for row in metrics] == pytest.approx([1e-3, 7.75e-4, 5.5e-4, 3.25e-4])
    assert all(row["actor/pg_clipfrac"] == 0 and row["actor/grad_norm"] > 0 for row in metrics[:2])
    assert all(abs(row["actor/ref_kl"]) < 1e-6 for row in metrics[:2])
    assert {row["actor/kl_coef"] for row in metrics[:3]} == {0.05}, "what steers the actor waits for it"


@pytest.mark.parametrize("name", ["searched", *marked_slow("searched in chunks")])
def test_a_searched_order_splits_backwards(runs, name):
    assert {"actor W", "critic W"} < {span.kind for span in Forecaster(RunFiles.read(runs[name])).spans(1)}
    assert all(pipeline.split for pipeline in load_schedule(runs[name] / "schedule.json").problem.pipelines)


RULES = [("time sharing", "time_sharing"), ("one model after the other", "serial")]


@pytest.mark.parametrize("name, rule", [*RULES, pytest.param("interleaved", "interleaved", marks=pytest.mark.slow)])
def test_an_order_by_rule_lies_beside_its_plan(runs, name, rule):
    plan, schedule = plan_of(runs[name])["schedule"], load_schedule(runs[name] / "schedule.json")
    assert plan["source"].endswith(f"fusion.intra_stage={rule}")
    places = {p.model: p.placement[:2] for p in schedule.problem.pipelines}
    assert (places["actor"] == places["critic"]) == (rule == "time_sharing")
    others = {other["setting"].split("=")[1]: other for other in plan["others"]}
    assert others["search"]["makespan_seconds"] <= plan["makespan_seconds"] * 1.001
    # what the run did is laid beside what its order promised, on the ranks that it trained on
    assert any(span.kind == "critic B" for span in Forecaster(RunFiles.read(runs[name])).spans(1))


def test_a_stop_text_ends_responses_wherever_they_are_decoded(runs):
    for row in metrics_of(runs["stopped"]):
        assert row["response_length/min"] >= 4 and 0 < row["response_length/clip_ratio"] < 1
        assert row["critic/score/mean"] == pytest.approx(1 - row["response_length/clip_ratio"])
    ends = "a response (of 4 tokens or more) ends with the text 'w19', after 24 tokens"
    assert ends in plan_of(runs["stopped"])["reasons"]


def test_stop_tokens_end_responses_beside_the_models_own(runs):
    actor, stop = runs.folder / "ending", [*range(13, 30)]
    shutil.copytree(runs.folder / "actor", actor)
    (actor / "generation_config.json").write_text('{"eos_token_id": [2, 7, 8, 9, 10, 11, 12]}')
    more = "trainer.iterations=1 trainer.sample_texts=16 rollout.samples_per_prompt=4 rollout.max_response_tokens=24"
    runs.start("stop tokens", f"actor.path={actor} rollout.stop_token_ids=[{','.join(map(str, stop))}]", more)
    samples = read_samples(runs.folder / "stop tokens/samples.jsonl")
    ended = [one.response.split()[-1] for one in samples if one.finish_reason == "stop" and one.response]
    numbers = {int(word[1:]) + 3 for word in ended}
    assert numbers & {*range(7, 13)} and numbers & {*stop} and len(samples) == 16
    for one in samples:
        inside = one.response.split()[: -1 if one.finish_reason == "stop" else None]
        assert not {int(word[1:]) + 3 for word in inside} & {2, *range(7, 30)}


TP2 = f"{stages('d1t2p1')} parallel.generation=d1t2p1"


@pytest.mark.parametrize("actor_rows, reward_rows", [(330, 288), pytest.param(288, 330, marks=pytest.mark.slow)])
def test_unequal_rows_train_as_the_least_of_them_alone_would(runs, actor_rows, reward_rows):
    """330 rows are padded to 384, 288 to 320: the shares of tensor ranks differ too. The tokenizer has 260 tokens."""
    base = runs.folder / f"rows-{actor_rows}"
    for role, size in (("actor", actor_rows), ("reward", reward_rows)):
        scored = role == "reward"
        write_tokenizer(write_checkpoint(base / role, vocab_size=size, scalar_head=scored, seed=1 + scored), 257)
    given = f"actor.path={base}/actor reward.path={base}/reward trainer.iterations=1"
    names = [f"{base.name}/{name}" for name in ("wide", "parted", "least")]
    runs.start(names[0], given)
    runs.start(names[1], given, TP2)
    for role in ("actor", "reward"):
        cut_rows(base / role, 288)
    runs.start(names[2], given)
    exported = load_file(base / "wide/export/actor/model.safetensors")["model.embed_tokens.weight"]
    assert len(exported) == actor_rows
    (wide,), (parted,), (least,) = (metrics_of(runs.folder / name) for name in names)
    compared = ("actor/", "critic/", "response_length/", "rollout/")
    keys = [key for key in least if key.startswith(compared) and not key.endswith("mfu")]
    assert len(keys) > 20
    for key in keys:
        same = least[key] if isinstance(least[key], str) else pytest.approx(least[key], rel=1e-4, abs=1e-6)
        assert wide[key] == same, key
    assert wide["rollout/train_logprob_abs_diff"] < 1e-5 and parted["rollout/train_logprob_abs_diff"] < 1e-5
    assert parted["critic/score/mean"] == pytest.approx(least["critic/score/mean"], rel=1e-3)
    assert (base / "wide/samples.jsonl").read_text() == (base / "least/samples.jsonl").read_text()


def cut_rows(folder: Path, rows: int) -> None:
    """Leave of the checkpoint's vocabulary the first rows alone."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    names = ("model.embed_tokens.weight", "lm_head.weight")
    cut = {name: w[:rows].clone() if name in names else w for name, w in load_file(file).items()}
    save_file(cut, str(file), metadata={"format": "pt"})


@pytest.mark.slow
def test_phases_need_the_memory_that_was_planned(programs, tmp_path):
    """Models wide enough that they, and not Python, decide."""
    rollout = dict(rollout__max_response_tokens=200, rollout__max_batched_tokens=512, algorithm__minibatches=1)
    file = write_run(tmp_path, **rollout, trainer__iterations=2, trainer__export=False, fusion__bucket_mib=2)
    wide = dict(hidden_size=256, num_hidden_layers=6, num_key_value_heads=4, head_dim=64, intermediate_size=1024)
    wide |= dict(vocab_size=2000, max_position_embeddings=512)
    for role in ("actor", "reward"):
        write_checkpoint(tmp_path / role, scalar_head=role == "reward", seed=1, scale=0.1, **wide)
    programs.trained(file)
    run = tmp_path / "run"
    peaks = {
        name.rpartition("/")[2]: peak for name, peak in metrics_of(run)[-1].items() if "perf/peak_memory_gb/" in name
    }
    off = {}
    for phase in plan_of(run)["memory"]["phases"]:
        parts = ("weights", "optimizer", "gradients", "activations", "kv", "buckets", "host")
        planned, measured = sum(phase[part] for part in parts) / 1e9, peaks[phase["phase"]]
        print(f"{phase['phase']:11s} planned {planned:.3f} GB, measured {measured - peaks['base']:.3f} beside the base")
        off[phase["phase"]] = measured / (peaks["base"] + planned) - 1
    assert len(off) == 4 and max(map(abs, off.values())) <= 0.15, off
