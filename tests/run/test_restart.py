"""Runs killed at named moments, and runs continued in other layouts, end like a run that was left alone."""

import json
import shutil

import pytest
from run_comparison import compare_runs
from testkit.programs import killed_forked
from testkit.runs_table import FUNCTIONS, assert_same_bits, curves_of, metrics_of
from testkit.tiny import write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

# RANK WHO COUNT REGEX of testkit/killed_training.py; a checkpoint begins after every iteration. Random moments of all
# ranks are for soak/test_kills.py
KILLS = (
    "0 one 1 building models",
    "0 one 2 start.0, .*: generation: step",
    "1 one 5 start.1, .*: generation: step",
    "1 one 1 inter-stage: migration",
    "1 one 1 start.1, .*: inference: ",
    "0 one 1 start.0, .*: inference: ",
    "1 one 1 start.0, .*train mini-batch 0",
    "1 one 3 start.1, .*: actor:",
    "0 one 1 file begins",
    "1 one 2 file begins",
    "1 all 1 file written",
    "0 all 2 commit begins",
    "0 one 1 commit ends",
    "0 all 2 commit ends",
    "1 one 1 exporting models",
)
ITERATIONS = 12
CURVES = ("actor/grad_norm", "critic/score/mean", "critic/grad_norm", "response_length/mean")


@pytest.fixture(scope="module")
def whole(programs, tmp_path_factory):
    base = tmp_path_factory.mktemp("whole")
    config = write_run(
        base,
        trainer__save_every=1,
        trainer__iterations=ITERATIONS,
        trainer__tensorboard=True,
        fusion__threshold=4,
        rollout__max_sequences_per_instance=3,  # the last ones wait, so that there is a tail to move
    )
    programs.trained(config, f"trainer.output_dir={base / 'whole'}")
    return config, base / "whole"


def test_kills_of_one_rank_and_within_a_save(programs, whole, tmp_path):
    config, run_dir = whole
    broken = tmp_path / "killed"
    settings = [f"trainer.output_dir={broken}", "trainer.resume=auto"]
    for number, moment in enumerate(KILLS, start=1):
        where = killed_forked(config, moment, tmp_path / f"{number}.log", *settings)
        print(f"{number}: {moment.split()[1]} killed in {where}", flush=True)
    programs.trained(config, *settings)
    assert [row["iteration"] for row in metrics_of(broken)] == list(range(ITERATIONS))
    assert len(assert_same_bits(run_dir, broken)) == 3
    assert (broken / "samples.jsonl").read_bytes() == (run_dir / "samples.jsonl").read_bytes()
    curves = curves_of(broken / "tensorboard", *CURVES)
    assert curves == curves_of(run_dir / "tensorboard", *CURVES)
    assert all([step for step, _ in curve] == list(range(ITERATIONS)) for curve in curves)
    assert [one.name for one in (broken / "checkpoints").glob("*.partial")] == []


@pytest.mark.parametrize("how, moment", [("true", "generation: beginning the group"), ("false", "a further round")])
def test_kills_while_groups_are_drawn_again(programs, tmp_path, how, moment):
    """How many prompts are used is part of a checkpoint."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    config = write_run(
        tmp_path,
        trainer__save_every=1,
        trainer__iterations=6,
        reward__path="",
        reward__signature="trl",
        reward__function=f"{tmp_path / 'functions.py'}:odd",
        reference__path="none",
        algorithm__name="grpo",
        algorithm__kl_coef=0,
        algorithm__filter_groups={"enable": True, "streaming": how == "true"},
        rollout__samples_per_prompt=2,
    )
    settings = [f"trainer.output_dir={tmp_path / 'killed'}", "trainer.resume=auto"]
    for number, rank in enumerate((0, 1), start=1):
        where = killed_forked(config, f"{rank} one {number} {moment}", tmp_path / f"{number}.log", *settings)
        print(f"{number}: rank {rank} killed in {where}", flush=True)
    programs.trained(config, *settings)
    programs.trained(config, f"trainer.output_dir={tmp_path / 'whole'}")
    assert len(assert_same_bits(tmp_path / "whole", tmp_path / "killed")) == 2


def test_other_layouts_and_world_sizes(programs, tmp_path):
    config = write_run(
        tmp_path,
        trainer__save_every=2,
        trainer__iterations=4,
        parallel__actor_train="d1t1p4",
        parallel__critic_train="d2t1p2",
        parallel__generation="d4t1p1",
        fusion__actor_microbatches=4,
    )
    whole = tmp_path / "whole"
    programs.trained(config, f"trainer.output_dir={whole}", ranks=4)
    for actor, critic, ranks in (("d2t1p2", "d4t1p1", 4), ("d2t2p1", "d2t2p1", 4), ("d1t1p2", "d2t1p1", 2)):
        here = tmp_path / actor
        shutil.copytree(whole, here)
        for name in ("finished.json", "checkpoints/latest"):
            (here / name).unlink()
        shutil.rmtree(here / "checkpoints" / "iteration-4")
        layouts = (f"actor_train={actor}", f"critic_train={critic}", f"generation=d{ranks}t1p1")
        settings = [f"parallel.{layout}" for layout in layouts] + ["fusion.actor_microbatches=2"]
        log = programs.trained(config, *settings, f"trainer.output_dir={here}", "trainer.resume=auto", ranks=ranks)
        assert f"actor_train d1t1p4 -> {actor}" in log
        assert [row["iteration"] for row in metrics_of(here)] == [0, 1, 2, 3]
        compared = compare_runs(whole, here)
        print(json.dumps({actor: {c.what: c.largest for c in compared}}))
        assert all(c.largest < 1e-5 for c in compared)
        # the same lengths of all samples; digests of what differs in its last bits say no more than that it does
        odd = {d.where.split()[-1] for c in compared for d in c.differences if d.size is None}
        assert odd <= {"rollout/digest", "rollout/scores_digest"}
