"""Runs whose layouts are auto: one table on all ranks, told and kept; killed ones resume in it, bit for bit."""

from pathlib import Path

import pytest
from testkit.paths import ROOT
from testkit.programs import call_tool, killed_forked
from testkit.runs_table import assert_same_bits, metrics_of

from rlhfuse.base.errors import InputError
from rlhfuse.config.auto_layouts import searched_keys
from rlhfuse.config.load import load_config
from rlhfuse.run.preflight import check_inputs

pytestmark = pytest.mark.timeout(3600)

QUICKSTART = ROOT / "examples" / "quickstart.yaml"
AUTO = ["parallel=auto", "fusion.actor_microbatches=auto", "trainer.recompute=auto", "trainer.device=cpu"]
ITERATIONS = 4
SHORT = f"""trainer.iterations={ITERATIONS} trainer.save_every=1 trainer.tensorboard=false trainer.watchdog_seconds=590
    fusion.search_seconds=0.5 rollout.max_response_tokens=64""".split()


def layout_lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(("layouts ", "lengths of the search"))]


@pytest.fixture(scope="module")
def whole(programs, tmp_path_factory) -> tuple[Path, str]:
    """The folder of a run that was left alone, and what it said."""
    run_dir = tmp_path_factory.mktemp("auto") / "whole"
    return run_dir, programs.trained(QUICKSTART, *AUTO, *SHORT, f"trainer.output_dir={run_dir}", ranks=4)


@pytest.mark.slow
def test_a_run_says_and_keeps_the_table_that_a_dry_run_prints(whole):
    run_dir, log = whole
    chosen, lengths = layout_lines(log)
    assert chosen.startswith("layouts of the search: generation=") and "lognormal" in lengths
    kept = load_config(run_dir / "config.yaml")
    assert searched_keys(kept) == () and "auto" not in kept.parallel.model_dump(exclude={"stage_layers"}).values()
    assert f"generation={kept.parallel.generation} " in chosen and f"actor_train={kept.parallel.actor_train} " in chosen
    dry = call_tool("train_ppo", "--config", QUICKSTART, *AUTO, *SHORT, "--dry-run", "--world-size", 4)
    assert dry.returncode == 0, dry.stderr
    assert layout_lines(dry.stdout) == [chosen, lengths]
    assert [row["iteration"] for row in metrics_of(run_dir)] == list(range(ITERATIONS))


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_no_bit(programs, whole, tmp_path):
    run_dir, _ = whole
    broken = tmp_path / "killed"
    settings = [*AUTO, *SHORT, f"trainer.output_dir={broken}", "trainer.resume=auto"]
    killed_forked(QUICKSTART, "2 one 1 start.2, .*: generation: step", tmp_path / "log", *settings, ranks=4)
    # another search might choose another table: what it is for has changed since
    log = programs.trained(QUICKSTART, *settings, "parallel.headroom=0.3", ranks=4)
    first = layout_lines(log)[0]
    assert first.startswith(f"layouts of {broken / 'checkpoints'}/iteration-") and ", which had: generation=" in first
    assert len(assert_same_bits(run_dir, broken)) == 3


@pytest.mark.slow
def test_where_nothing_fits_a_line_says_so_before_anything_is_launched(programs, tmp_path):
    run_dir = tmp_path / "run"
    settings = [*AUTO, *SHORT, f"trainer.output_dir={run_dir}", "trainer.memory_limit_gb=0.01"]
    nobody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # whoever asked for the others would wait or fail
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    done = programs.tool("train_ppo", "--config", QUICKSTART, *settings, **place, **nobody)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and "actor_train" in line and "lacks " in line, done.stderr
    assert not run_dir.exists() and "Traceback" not in done.stderr


def test_layouts_of_a_checkpoint_are_not_asked_for_where_none_is_auto(tmp_path):
    fixed = [
        "trainer.device=cpu",
        "fusion.actor_microbatches=4",
        *SHORT,
        f"trainer.output_dir={tmp_path / 'run'}",
        "trainer.resume=auto",
    ]
    inputs = check_inputs(load_config(QUICKSTART, fixed), 4)
    assert not layout_lines("\n".join(inputs.notes)) and inputs.config.parallel.critic_train == "d2t1p2"


@pytest.mark.parametrize(
    "rows, message",
    [
        (["parallel.generation=d2t1p1"], "parallel.generation=d2t1p1: dp(2) * tp(1) * pp(1) = 2 != world_size(4)"),
        (["parallel.lengths=/nowhere"], "parallel.lengths=/nowhere: "),
        (["rollout.max_response_tokens=4000"], "context("),
    ],
)
def test_an_auto_beside_what_cannot_be_is_refused_by_its_key(rows, message):
    with pytest.raises(InputError) as caught:
        check_inputs(load_config(QUICKSTART, [*AUTO, *SHORT, *rows]), 4)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_mini_batch_that_does_not_reach_all_pipelines_says_what_would_do():
    few = (
        "rollout.prompts_per_iteration=1 rollout.samples_per_prompt=1 algorithm.minibatches=1 fusion.least_threshold=0"
    )
    rows = "parallel.actor_train=d4t1p1 parallel.critic_train=d4t1p1"
    with pytest.raises(InputError, match="a mini-batch of 1 samples cannot fill 4 pipelines .* lower algorithm.minib"):
        check_inputs(load_config(QUICKSTART, [*SHORT, "trainer.device=cpu", *few.split(), *rows.split()]), 4)
