"""Profiling on two ranks: what is measured, and the program's refusals."""

import pytest
from cost_profiles.points import check_world, points_of, tensor_degrees, with_tensor
from testkit.paths import ROOT
from testkit.programs import call_tool

from rlhfuse.base.errors import InputError
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.costs.profile_files import load_costs

POOL_RANKS = 2

TINY = ROOT / "examples" / "tiny"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SETTINGS = f"""actor.path={TINY}/actor reward.path={TINY}/reward trainer.device=cpu
    parallel.generation=d2t1p1 parallel.actor_train=d1t1p2 parallel.critic_train=d1t1p2
    data.max_prompt_tokens=32 rollout.max_response_tokens=32 rollout.prompts_per_iteration=4 algorithm.minibatches=1
    rollout.samples_per_prompt=1 rollout.max_batched_tokens=128 fusion.least_threshold=0""".split()


def quickstart(*changes: str):
    return resolve_device(load_config(QUICKSTART, [*SETTINGS, *changes]))


def profile_on(rank: int, changes: tuple[str, ...]) -> tuple[dict, list[str]]:
    from cost_profiles.profiler import Profiler

    from rlhfuse.parallel.device import choose_device

    config = quickstart(*changes)
    lines: list[str] = []
    device = choose_device("cpu", 0, 1)
    made = Profiler(config, read_specs(config), device, limit_seconds=0.01, say=lines.append).run()
    return made.to_dict(), lines


@pytest.mark.slow
def test_two_instances_measure_everything(workers):
    """The time limit is over at once, so that every kind has its least points only."""
    (made, lines), _ = workers.run(profile_on, ())
    assert set(made["score"]) == {"reference", "critic", "reward"}
    assert set(made["training"]) == {"actor", "critic"} and made["all_reduce"] is None
    assert made["made_for"]["generation_tp"] == 1 and made["made_for"]["reference_inference_tp"] == 1
    assert all(second > 0 for second in made["decode"]["seconds"]) and made["swap_in"] > 0
    assert all(second > 0 for second in made["move"]["seconds"])
    assert any("decode: 2 points" in line for line in lines), lines  # all that there are


def test_tensor_parallel_ranks_measure_together(workers):
    changes = ("parallel.generation=d1t2p1", "parallel.actor_train=d1t2p1", "parallel.critic_train=d1t2p1")
    (made, lines), _ = workers.run(profile_on, changes)
    assert made["training"]["actor"]["tp"] == 2 and made["all_reduce"]["seconds"][-1] > 0
    for grids in made["training"].values():  # each part of a split backward; noise may leave a layer nothing
        assert len(grids["layer_backward_input"]["seconds"]) == len(grids["layer_backward"]["seconds"])
        assert grids["layer_weight_gradient"]["axes"] == grids["layer_backward"]["axes"]
    assert any("one instance only" in line for line in lines)


def extremes_on(rank: int) -> tuple[list[float], float]:
    import torch
    import torch.distributed as dist
    from cost_profiles.work import Builder, GenerationWork

    from rlhfuse.parallel.device import choose_device
    from rlhfuse.parallel.groups import GroupMaker

    config = quickstart("rollout.max_response_tokens=480")  # with the prompt, the models' whole context of 512
    points = points_of(config)
    specs, device = read_specs(config), choose_device("cpu", 0, 1)
    builder = Builder(rank, dist.get_world_size(), device, torch.float32, GroupMaker(600))
    work = GenerationWork(config, specs["actor"], points, builder, tp=1)
    steps = work.decode(*points.decode()[-1], 5)
    seconds = work.prefill(*points.packs()[-1])
    assert not work.engine.has_unfinished()
    return steps, seconds


def test_the_largest_points_fit_into_context_and_cache(workers):
    """Samples fill the context to the last token, and the cache holds no more than the run's."""
    for steps, seconds in workers.run(extremes_on):
        assert len(steps) == 5 and min(steps) > 0 and seconds > 0


def test_points_reach_what_the_run_can_meet():
    points = points_of(quickstart("rollout.prompts_per_iteration=24", "rollout.max_response_tokens=480"))
    assert points.batches == (1, 2, 4, 8, 16, 24) and points.contexts == (64, 128, 256, 512)
    assert points.longest == 512 and max(b * c for b, c in points.decode()) <= points.capacity
    assert all(tokens < sequences * points.longest for tokens, sequences in points.packs())
    costs = [b * c for b, c in points.decode()]
    assert costs == sorted(costs)


def test_ranks_that_hold_no_whole_replica_are_refused():
    config = quickstart("parallel.generation=d1t2p1")
    with pytest.raises(InputError, match="3 ranks % tp\\(2\\) of parallel.generation = 1, must be 0"):
        check_world(config, 3)
    check_world(config, 4)


def test_a_run_at_another_tensor_degree_has_it_in_all_tasks():
    config = quickstart()
    specs = read_specs(config)
    for made in (config, quickstart("parallel=auto")):
        assert set(tensor_degrees(with_tensor(made, specs, 2, 4)).values()) == {2}
    with pytest.raises(InputError, match="heads.* % tp\\(3\\)"):
        with_tensor(config, specs, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [["parallel.inference=d2t1p1"], ["parallel=auto", "trainer.recompute=auto"]])
def test_the_program_measures_each_degree(programs, tmp_path, layouts):
    out = tmp_path / "p.json"
    measured = ("--config", QUICKSTART, *SETTINGS, *layouts, "--limit", 2, "--tensor", "1,2", "--out", out)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    done = programs.python(*torchrun, ROOT / "tools/profile_costs.py", *measured)
    assert done.returncode == 0, done.stderr
    profiles = load_costs(out)
    assert profiles.degrees == (1, 2)
    assert [one.training["actor"].tp for one in profiles.profiles] == [1, 2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--limit", "0"], "--limit 0.0 must be above 0 seconds"),
        (["--tensor", "1,two"], "--tensor 1,two: 'two' is not a tensor degree; give some such as 1,2,4"),
        (["--tensor", "2"], "1 ranks % tp(2) = 1, must be 0"),
        (["actor.path=/nowhere"], "is no folder"),
        (["parallel=auto"], "parallel.generation=auto: costs are measured at tensor degrees that are known; name them"),
        (["parallel=auto", "--tensor", "2"], "1 ranks % tp(2) = 1, must be 0"),
        (["parallel.actor_train=d1t1p8", "parallel.critic_train=d1t1p8"], "parallel.generation=d4t1p1"),
    ],
)
def test_bad_input_ends_the_program_with_2(tmp_path, arguments, message):
    done = call_tool("profile_costs", "--config", QUICKSTART, "--out", tmp_path / "p.json", *arguments)
    assert done.returncode == 2 and message in done.stderr and not list(tmp_path.iterdir()), done.stderr


def test_an_existing_profile_is_kept(programs, tmp_path):
    (tmp_path / "p.json").write_text("{}")
    done = programs.tool("profile_costs", "--config", QUICKSTART, "--out", tmp_path / "p.json")
    assert done.returncode == 2 and "exists; give another name or --force" in done.stderr
    assert (tmp_path / "p.json").read_text() == "{}"
