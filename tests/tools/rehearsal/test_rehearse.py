"""tools/rehearse.py: a slice of Llama-3-8B at its true widths, one rank of 16, all phases; what it refuses."""

import json

import pytest
from rehearsal import shim
from rehearsal.stages import WHOLE, distinct_ranks, planned_bytes, rehearsal_draft, rehearse
from testkit.llama3 import SHARED, SIZES
from testkit.programs import call_tool

from rlhfuse.config.load import load_config
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.search.search import SearchSettings, search
from tools import rehearse as tool

pytestmark = pytest.mark.skipif(bool(shim.obstacle()), reason=shim.obstacle())
SLICE = SHARED | SIZES["8B"] | dict(num_hidden_layers=8)
SMALL = SHARED | dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
RUN = """
actor: {{path: {folder}}}
reward: {{path: {folder}}}
data: {{train_files: [none.jsonl], max_prompt_tokens: 512}}
rollout: {{prompts_per_iteration: 32, samples_per_prompt: 4, max_response_tokens: 1024}}
algorithm: {{minibatches: 2}}
fusion: {{microbatch_tokens: 12288, intra_stage: false}}
parallel: {{actor_train: d2t2p4, critic_train: d2t2p4, generation: d8t2p1}}
trainer: {{dtype: bfloat16, device: cuda, hardware: h100}}
"""
OF_FOUR = """data.max_prompt_tokens=64 rollout.prompts_per_iteration=16 rollout.samples_per_prompt=1
    rollout.max_response_tokens=64 fusion.microbatch_tokens=auto fusion.actor_microbatches=2
    parallel.actor_train=d1t2p2 parallel.critic_train=d1t2p2
    parallel.generation=d2t2p1 parallel.inference=d2t2p1""".split()


def write(folder, shape):
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def run_yaml(tmp_path_factory):
    return write(tmp_path_factory.mktemp("slice"), SLICE)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """What asks the tool for a small run of four ranks."""
    shape = SMALL | dict(num_key_value_heads=2, vocab_size=1024)
    return ("--config", write(tmp_path_factory.mktemp("small"), shape), "--world-size", 4, *OF_FOUR)


@pytest.fixture(scope="module")
def report(programs, run_yaml):
    """Rank 6: the actor's last stage and the critic's first; micro-batches that no whole number of samples fills."""
    asked = ["fusion.microbatch_tokens=11000"]
    draft = rehearsal_draft(load_config(run_yaml, asked), 16)
    plan = make_plan(draft)
    assert PlanReport.of(plan).memory.keeps_generation
    found = rehearse(run_yaml, asked, plan, 6, WHOLE, print)
    return tool.RankReport(found, planned_bytes(draft, plan, 6), PlanReport.of(plan).memory.limit)


def test_whole_iterations_run_twice_as_on_cuda_and_are_saved_and_resumed(report):
    names = [phase["phase"] for phase in report.found["phases"]]
    iteration = ["moves", "generation", "inference", "training", "checkpoint"]
    assert names == ["start", *iteration, *iteration, "resume"]
    assert report.found["problems"] == {}
    assert report.too_full == () and "rank 6 at its peak, training" in report.table()
    assert "training" in report.text() and "over the limit" not in report.text()


def test_samples_migrate_here_and_from_here(report):
    """Sent in the first iteration, received in the second, by the run's own barrier and transfer."""
    tail = 128 // 5 // 8  # of an instance, at the trigger
    assert report.found["moved"] >= 2 * (tail - 1)
    assert f"{report.found['moved']} samples came from other instances or went there" in report.text()


def test_memory_is_what_was_planned(report):
    """Training holds what its schedule holds at most, which not every rank does."""
    errors = {
        name: report.planned[name] / phase["peak"] - 1 for name, phase in report.peaks.items() if name in report.planned
    }
    training = errors.pop("training")
    assert 0 <= training <= 0.03 and max(map(abs, errors.values())) <= 0.01, (errors, training)


def test_split_backwards_hold_what_was_planned(programs, run_yaml, tmp_path):
    """What B leaves for W, and the gradients that were received for it: a searched schedule, in the fullest place."""
    asked, file = ["fusion.intra_stage=search", "fusion.split_backward=true"], tmp_path / "schedule.json"
    draft = rehearsal_draft(load_config(run_yaml, asked), 16)
    save_schedule(file, search(draft.training.problem, SearchSettings(iterations=20_000, objective="memory"))[0])
    draft = rehearsal_draft(load_config(run_yaml, [*asked, f"fusion.schedule={file}"]), 16)
    plan = make_plan(draft)
    peaks = draft.memory.held_by(*plan.schedules.values())
    rank = max(distinct_ranks(draft), key=lambda rank: planned_bytes(draft, plan, rank)["training"])
    assert max(peaks) > 0 and all(pipeline.split for pipeline in plan.likeliest.problem.pipelines)
    found = rehearse(run_yaml, [*asked, f"fusion.schedule={file}"], plan, rank, ("training",), print)
    planned = tool.RankReport(found, planned_bytes(draft, plan, rank), PlanReport.of(plan).memory.limit)
    beside = draft.memory.generation.weights + draft.memory.generation.kv  # which is kept, and was not rehearsed
    assert PlanReport.of(plan).memory.keeps_generation and found["problems"] == {}
    training = (planned.planned["training"] - beside) / planned.peaks["training"]["peak"] - 1
    assert -0.01 <= training <= 0.03, training


def test_no_layer_waits_for_the_host(report):
    places = [place for phase in report.found["phases"][1:] for place in phase["reads"]]
    assert places and not [place for place in places if place.startswith("models/")]


def test_one_rank_stands_for_each_combination_of_stages(run_yaml):
    assert distinct_ranks(rehearsal_draft(load_config(run_yaml, []), 16)) == (0, 2, 4, 6)
    layouts = ["parallel.critic_train=d4t2p2", "parallel.actor_train=d2t2p4"]
    assert len(distinct_ranks(rehearsal_draft(load_config(run_yaml, layouts), 16))) == 4


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--world-size", "16", "--rank", "16"], "--rank 16 is none of 16 ranks"),
        (["--world-size", "16", "trainer.device=cpu"], "set trainer.device=cuda"),
        (["--world-size", "16", "data.max_prompt_tokens=auto"], "give a number to rehearse with"),
        (["--world-size", "12"], "12"),
        (["--world-size", "16", "trainer.memory_limit_gb=0.01"], "but a rank of this h100 has"),
    ],
)
def test_bad_input_is_one_line(run_yaml, arguments, complaint):
    done = call_tool("rehearse", "--config", run_yaml, *arguments)
    assert done.returncode == 2 and complaint in done.stderr and done.stderr.count("\n") == 1


def test_a_torch_with_cuda_is_refused_in_a_line(run_yaml, tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(shim, "_torch", lambda: tmp_path)
    done = call_tool("rehearse", "--config", run_yaml, "--world-size", 16)
    assert done.returncode == 2 and "install its build for CPUs" in done.stderr and done.stderr.count("\n") == 1


def test_without_a_compiler_one_line_says_so(programs, run_yaml, tmp_path):
    empty = {"PATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = programs.tool("rehearse", "--config", run_yaml, "--world-size", 16, **empty)
    assert done.returncode == 2 and "needs g++" in done.stderr and done.stderr.count("\n") == 1


def test_no_kernel_is_compiled_in_the_middle_of_a_program(programs, tmp_path):
    """Micro-batches of two samples of 33 tokens, and of one: positions begin at any alignment behind the tokens."""
    run_yaml = write(tmp_path, SMALL | dict(hidden_size=64, num_key_value_heads=2, vocab_size=304))
    asked = ["data.max_prompt_tokens=13", "rollout.max_response_tokens=20", "rollout.prompts_per_iteration=2"]
    asked += ["fusion.microbatch_tokens=auto", "fusion.actor_microbatches=3", "parallel.generation=d2t1p1"]
    asked += ["parallel.actor_train=d1t1p2", "parallel.critic_train=d1t1p2"]
    draft = rehearsal_draft(load_config(run_yaml, asked), 2)
    found = rehearse(run_yaml, asked, make_plan(draft), 1, ("training",), print)
    assert found["launches"]["join_kernel"] > 0 and found["problems"] == {}


def test_losses_of_whole_samples_and_measured_entropies_wait_for_no_host(programs, tmp_path):
    """On the actor's last stage, samples that moved among its own."""
    run_yaml = write(tmp_path, SMALL | dict(num_key_value_heads=2, vocab_size=1024))
    asked = [*OF_FOUR, "algorithm.policy_loss.loss_mode=gspo", "algorithm.top_entropy_quantile=0.2"]
    asked += ["algorithm.kl_in=loss", "algorithm.kl_estimator=k3+", "algorithm.entropy_coef=0.01"]
    found = rehearse(run_yaml, asked, make_plan(rehearsal_draft(load_config(run_yaml, asked), 4)), 2, WHOLE, print)
    assert found["problems"] == {} and found["moved"] > 0
    places = [place for phase in found["phases"][1:] for place in phase["reads"]]
    assert places and not [place for place in places if place.startswith(("ppo/", "fusion/intra/training_step"))]


TOOL = """def add(a: int) -> str:
    \"\"\"Add one.

    Args:
        a: A number.
    \"\"\"
    return str(a + 1)
"""


def test_samples_pause_for_tools_and_go_on(programs, tmp_path):
    """On a rank of a tensor-parallel instance, in both iterations; nothing more waits for the device."""
    run_yaml = write(tmp_path, SMALL | dict(num_key_value_heads=2, vocab_size=1024))
    (tmp_path / "tools.py").write_text(TOOL)
    tools = ["rollout.multi_turn.enable=true", f"rollout.multi_turn.function_tool_path={tmp_path / 'tools.py'}"]
    places = []
    for asked, paused in ([*OF_FOUR], 0), ([*OF_FOUR, *tools], 2):
        found = rehearse(run_yaml, asked, make_plan(rehearsal_draft(load_config(run_yaml, asked), 4)), 2, WHOLE, print)
        assert found["problems"] == {} and found["moved"] > 0 and found["paused"] == paused
        places.append({place for phase in found["phases"][1:] for place in phase["reads"]})
    assert places[0] == places[1]


# how it ends


def found(problems: dict[str, int], *peaks: int) -> dict:
    """A rank's rehearsal of one phase, iteration by iteration."""
    phase = dict(phase="training", host=0, reserved=0, host_peak=0, table=[], reads={})
    phases = [{**phase, "iteration": number, "peak": peak} for number, peak in enumerate(peaks)]
    return dict(rank=0, phases=phases, problems=problems, moved=0, paused=0)


@pytest.mark.parametrize(
    "peak, problems, code, said",
    [
        (10**9, {}, 0, "training"),
        (81 * 10**9, {}, 2, "rank 0: training takes 75.4 GiB, a rank has 71.9 GiB beside its process"),
        (10**9, {"refused by NCCL: a tensor on the CPU": 3}, 1, "3 times: refused by NCCL: a tensor on the CPU"),
        (81 * 10**9, {"all_reduce of a tensor on the CPU": 3}, 2, "over the limit"),
    ],
)
def test_exits_with_2_over_the_limit_and_with_1_for_what_nccl_refuses(small, monkeypatch, peak, problems, code, said):
    monkeypatch.setattr(tool, "rehearse", lambda *_: found(problems, peak))
    done = call_tool("rehearse", *small, "--rank", 0)
    assert done.returncode == code and said in done.stdout


@pytest.mark.slow
def test_one_rank_of_each_combination_of_stages_is_rehearsed(programs, small):
    done = programs.tool("rehearse", *small, "--stages", "--phase", "moves")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rehearsing rank 0, 2 of 4" in done.stdout
    assert "memory of rank 0" in done.stdout and "memory of rank 2" in done.stdout
