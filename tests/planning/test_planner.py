"""The plan: what it decides, that it saves and loads, and which files it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from four_ranks import SPECS, run
from sim_helpers import linear_cost, long_tail

from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.measured import save_measured_cost
from rlhfuse.decisions.layouts import batch_arithmetic, check_layouts
from rlhfuse.errors import InputError
from rlhfuse.planning.memory import readable_bytes
from rlhfuse.planning.memory_check import machine_bytes, memory_limit, refuse_unless_fits
from rlhfuse.planning.plan import load_plan, save_plan
from rlhfuse.planning.planner import make_plan, plan_run, task_costs, training_problem
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.rules.builders import serial_1f1b
from rlhfuse.simulator.threshold import save_threshold


def problem_of(made):
    tasks = check_layouts(made, SPECS, 4)
    costs = task_costs(made, SPECS, tasks, hardware_by_name("cpu"))
    return training_problem(costs, batch_arithmetic(made, tasks), 384)


def test_a_plan_says_what_and_why():
    plan = make_plan(run(), SPECS, 4)
    assert plan.threshold_samples is None and plan.threshold is None
    assert plan.seconds.gen_infer_fused == plan.seconds.gen_infer_serial  # no tail is known yet
    assert plan.seconds.training_fused < plan.seconds.training_serial
    assert plan.schedule.lower_bound_seconds <= plan.schedule.makespan_seconds
    text = plan.render()
    for words in ("16 prompts x 4 copies = 64 samples", "actor_train", "d1t1p4", "upper bounds", "lower bound"):
        assert words in text
    longest = f"{4 * (128 + 256):,} tokens"
    for words in (longest, "gap 0.00%", "--lengths FILE[:COLUMN]", "metrics.jsonl", "inference beyond it"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_lengths_give_a_threshold():
    plan = make_plan(run(), SPECS, 4, lengths=long_tail(500, longest=256))
    assert plan.threshold is not None and plan.threshold_samples == plan.threshold.threshold
    assert plan.threshold.samples == 64 and plan.threshold.instances == 4
    assert plan.seconds.gen_infer_fused <= plan.seconds.gen_infer_serial
    assert plan.seconds.gen_infer_fused == pytest.approx(plan.threshold.fused_seconds)
    assert 0 < plan.seconds.generation_fused < plan.seconds.gen_infer_fused
    assert "drawn from 500 past samples" in plan.render() and "fusion.threshold_file" in plan.render()


@pytest.mark.parametrize(
    "keys, needed, limit",
    [
        ({"trainer__memory_limit_gb": 2.0}, lambda phase: phase.device + phase.host + 620_000_000, 2e9),
        ({"trainer__hardware": "a100"}, lambda phase: phase.device, 80e9),
    ],
)
def test_memory_is_shown_against_what_a_rank_has(keys, needed, limit):
    plan = make_plan(run(**keys), SPECS, 4)
    for phase in plan.memory:
        assert plan.needed_bytes(phase) == needed(phase) and plan.memory_limit == limit
        rows = [line for line in plan.render().splitlines() if line.startswith(f"  {phase.phase} ")]
        assert any(row.endswith(f" {needed(phase) / limit:.1%}") for row in rows)
    offloaded = readable_bytes(4 * plan.memory[0].host)
    assert (f"{offloaded} on a node of 4 ranks" in plan.render()) == (plan.hardware == "a100")


def test_files_are_those_that_the_run_will_write():
    keys = dict(trainer__save_every=5, trainer__tensorboard=False, trainer__wandb="offline")
    files = dict(make_plan(run(**keys), SPECS, 4).files)
    assert files["checkpoints/iteration-N/"].startswith("every 5 iterations, ") and "wandb/" in files
    assert "tensorboard/" not in files and "export/critic/" in files and "(no checkpoints)" not in files
    states = 12 * (SPECS["actor"].parameters() + SPECS["critic"].parameters(scalar_head=True))
    assert readable_bytes(states) in files["checkpoints/iteration-N/"]
    none = dict(make_plan(run(trainer__export=False), SPECS, 4).files)
    assert "(no checkpoints)" in none and "export/actor/" not in none


def test_the_plan_round_trips(tmp_path):
    for lengths in (None, long_tail(64)):
        plan = make_plan(run(), SPECS, 4, lengths=lengths)
        save_plan(plan, tmp_path / "plan.json")
        assert load_plan(tmp_path / "plan.json") == plan


def test_memory_by_hand():
    """float32 on 4 ranks: the actor is cut in 4 stages, the critic in 2, generation copies whole."""
    plan = make_plan(run(), SPECS, 4)
    moves, generation, inference, training = plan.memory
    whole, layer = SPECS["actor"].parameters(), SPECS["actor"].layer_parameters
    actor_stage = 2 * layer + 512 * 64 + 64  # the last: layers, output layer and norm
    critic_stage = 4 * layer + 512 * 64  # the first: layers and embedding
    trained = 4 * (actor_stage + critic_stage)
    assert training.weights == trained and training.gradients == trained
    assert training.optimizer == 8 * actor_stage + 8 * critic_stage // 2
    critic_copy = 4 * SPECS["actor"].parameters(scalar_head=True)
    assert moves.weights == trained + 4 * whole + critic_copy and moves.buckets == 4 * whole  # less than 64 MiB
    assert moves.gradients == generation.gradients == inference.gradients == 0
    assert generation.weights == trained + 4 * whole
    assert generation.kv == 16 * 384 * SPECS["actor"].kv_bytes_per_token(4)
    assert generation.host == 4 * whole + 2 * critic_copy
    assert inference.weights == trained + 4 * whole + 2 * critic_copy  # reference, reward, critic; no generation copy
    longest = 4 * 384  # tokens of a micro-batch
    spec = SPECS["actor"]
    layer_kept = 4 * (6 * spec.hidden + (4 * spec.heads + 3 * spec.kv_heads) * spec.head_dim + 4 * spec.mlp)
    passing = longest * (layer_kept + 2 * 512 * 4)  # one layer's gradients; logits and theirs
    assert inference.kv == 0 and training.activations == plan.schedule.peak_activation_bytes + passing
    assert training.device == trained * 2 + training.optimizer + training.activations


def test_what_cannot_fit_is_refused(monkeypatch):
    machine = hardware_by_name("a100")
    phases = make_plan(run(), SPECS, 4).memory
    refuse_unless_fits(phases, machine, 1e9)
    with pytest.raises(InputError, match=r"memory: training needs .* per rank \(weights .*, but a rank of this a100"):
        refuse_unless_fits(phases, machine, 1e6)
    laptop = replace(hardware_by_name("cpu"), process_bytes=10**12)
    with pytest.raises(InputError, match="the process 931 GiB.*trainer.memory_limit_gb"):
        refuse_unless_fits(phases, laptop, 1e9)
    assert memory_limit(run(), machine, 4) == machine.memory_bytes
    assert memory_limit(run(trainer__memory_limit_gb=3.0), machine, 4) == 3e9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_limit(run(), hardware_by_name("cpu"), 16) == machine_bytes() / 8


def test_weight_moves_are_in_the_plan():
    plan = make_plan(run(), SPECS, 4)
    actor, critic = plan.weight_moves
    assert plan.seconds.weight_moves == actor.seconds + critic.seconds > 0
    for seconds, side in ((plan.seconds.serial, "serial"), (plan.seconds.fused, "fused")):
        parts = (getattr(plan.seconds, f"{part}_{side}") for part in ("gen_infer", "training"))
        assert seconds == pytest.approx(actor.seconds + critic.seconds + sum(parts))
    (row,) = (line.split() for line in plan.render().splitlines() if "weights moved   " in line)
    assert row[2:] == [f"{plan.seconds.weight_moves:.4g}"] * 2
    assert (actor.source, actor.target) == ("actor_train d1t1p4", "generation d4t1p1")
    whole = 4 * SPECS["actor"].parameters()
    assert actor.traffic.stays == whole and actor.traffic.within == 3 * whole and actor.traffic.across == 0
    assert critic.traffic.stays == critic.traffic.within == 2 * 4 * SPECS["actor"].parameters(scalar_head=True)
    assert "critic_train d2t1p2 -> critic_inference d4t1p1" in make_plan(run(), SPECS, 4).render()


ROWS = ("generation", "reference_inference", "reward_inference", "critic_inference")
ONE_INSTANCE = {f"parallel__{row}": "d1t4p1" for row in ROWS}


@pytest.mark.parametrize(
    "keys, world, expected, reason",
    [
        ({"fusion__inter_stage": False}, 4, 0, "fusion.inter_stage is false"),
        ({"fusion__threshold": "13"}, 4, 13, "R_t = 13: fusion.threshold says so"),
        (ONE_INSTANCE, 4, 0, "one generation instance"),
    ],
)
def test_threshold_from_the_config(keys, world, expected, reason):
    plan = make_plan(run(**keys), SPECS, world)
    assert plan.threshold_samples == expected
    assert any(reason in sentence for sentence in plan.threshold_reasons)


def test_threshold_file_is_used_and_checked(tmp_path):
    made = make_plan(run(), SPECS, 4, lengths=long_tail(500)).threshold
    file = tmp_path / "threshold.json"
    save_threshold(made, file)
    plan = make_plan(run(fusion__threshold_file=str(file)), SPECS, 4)
    assert plan.threshold == made and plan.seconds.gen_infer_fused == made.fused_seconds
    raw = made.to_dict()
    for change, message in (
        ({"instances": 8}, "made for 8 generation instances, this run has 4; calibrate again"),
        ({"samples": 128}, "of 128 samples, this run has 64"),
    ):
        file.write_text(json.dumps({**raw, **change}))
        with pytest.raises(InputError, match=message):
            make_plan(run(fusion__threshold_file=str(file)), SPECS, 4)


def test_schedule_file_is_used_and_checked(tmp_path):
    file = tmp_path / "schedule.json"
    save_schedule(file, serial_1f1b(problem_of(run())))
    plan = make_plan(run(fusion__schedule=str(file)), SPECS, 4)
    assert str(file) in plan.schedule.source
    assert plan.schedule.makespan_seconds > make_plan(run(), SPECS, 4).schedule.makespan_seconds
    assert plan_run(run(fusion__schedule=str(file)), SPECS, 4)[1].orders == serial_1f1b(problem_of(run())).orders
    with pytest.raises(InputError, match="microbatches 4, this run has 8"):
        make_plan(run(fusion__schedule=str(file), fusion__actor_microbatches=8), SPECS, 4)


def test_serial_training_when_intra_stage_is_off():
    plan = make_plan(run(fusion__intra_stage=False), SPECS, 4)
    assert "fusion.intra_stage is false" in plan.schedule.source


@pytest.mark.parametrize("critic, source", [("d2t1p2v2", "interleaved 1F1B"), ("d2t1p2", "serial 1F1B")])
def test_interleaved_layouts_are_planned(critic, source):
    layouts = {"parallel__actor_train": "d1t1p4v2", "parallel__critic_train": critic}
    off, schedule = plan_run(run(fusion__intra_stage=False, **layouts), SPECS, 4)
    assert off.schedule.source.startswith(source)
    assert schedule.problem.pipeline("actor").placement == (0, 1, 2, 3) * 2
    fused = make_plan(run(**layouts), SPECS, 4)
    assert fused.schedule.makespan_seconds < off.schedule.makespan_seconds


def test_profile_prices_generation(tmp_path):
    save_measured_cost(linear_cost(swap_in=100.0), tmp_path / "profile.json")
    plan = make_plan(run(fusion__profile=str(tmp_path / "profile.json")), SPECS, 4)
    assert plan.seconds.gen_infer_serial > 100


def test_memory_that_does_not_fit_is_said():
    huge = {role: replace(spec, mlp=2_000_000) for role, spec in SPECS.items()}
    plan = make_plan(run(), huge, 4)
    assert any("DOES NOT FIT" in reason for reason in plan.reasons)


def test_bad_plan_files_are_refused(tmp_path):
    file = tmp_path / "plan.json"
    for text, message in (("{", "not valid JSON"), ('{"version": 1}', "version 1 is unknown"), ("{}", "no plan.json")):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            load_plan(file)
