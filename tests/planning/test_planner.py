"""The plan: what it decides, that it saves and loads, and which schedules and thresholds it refuses."""

import json
from dataclasses import replace

import pytest
from run_report.program_times import makespan, program_times
from testkit.flat_profile import facts_of, trained, training
from testkit.four_ranks import SPECS, drafted, planned, run, shared_plan
from testkit.sim_helpers import linear_file, long_tail

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.base.json_values import to_json
from rlhfuse.base.readable_bytes import readable_bytes
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.costs.hardware import hardware_by_name
from rlhfuse.costs.machine import Host, memory_limit
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.costs.speculation import guess_bytes
from rlhfuse.planning.plan import Plan
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.training.training_problem import TICK_SECONDS
from rlhfuse.schedule.io import save_schedule
from rlhfuse.schedule.ir.action import Kind
from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.program.lowering import lower
from rlhfuse.schedule.program.verify import verify
from rlhfuse.schedule.rules.builders import greedy, min_memory, serial_1f1b

MB = 10**6


def problem_of(made):
    return drafted(made, SPECS, 4).training.problem


def test_a_plan_says_what_and_why():
    plan = PlanReport.of(shared_plan())
    assert plan.threshold.samples is None, "until lengths are known"
    assert plan.threshold.curve is not None and plan.threshold.curve.threshold > 0
    assert plan.seconds.gen_infer_fused == plan.threshold.curve.fused_seconds < plan.seconds.gen_infer_serial
    assert plan.seconds.training_fused <= plan.seconds.training_serial  # as fast where cores are short
    assert plan.schedule.makespan_seconds < plan.schedule.serial_makespan_seconds
    assert plan.schedule.lower_bound_seconds <= plan.schedule.makespan_seconds
    text = plan.render()
    longest = f"{4 * (128 + 256):,} tokens"
    for words in ("16 prompts x 4 copies = 64 samples", "actor_train", "d1t1p4", "lengths are assumed", "lower bound"):
        assert words in text
    for words in (longest, "gap 0.00%", "parallel.lengths=FILE[:COLUMN]", "metrics.jsonl", "inference beyond it"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_lengths_give_a_threshold():
    plan = PlanReport.of(planned(run(), lengths=long_tail(500, longest=256)))
    assert plan.threshold.curve is not None and plan.threshold.samples == plan.threshold.curve.threshold
    assert plan.threshold.curve.samples == 64 and plan.threshold.curve.instances == 4
    assert plan.seconds.gen_infer_fused <= plan.seconds.gen_infer_serial
    assert plan.seconds.gen_infer_fused == pytest.approx(plan.threshold.curve.fused_seconds)
    assert 0 < plan.seconds.generation_fused < plan.seconds.gen_infer_fused
    assert "lengths are those of 500 samples of past runs" in plan.render()


@pytest.mark.parametrize(
    "keys, needed, limit",
    [
        ({"trainer__memory_limit_gb": 2.0}, lambda phase: phase.device + phase.host + 720_000_000, 2e9),
        # a context; groups of replicas 1, of all ranks 2; two neighbours, both ways
        ({"trainer__hardware": "a100"}, lambda phase: phase.device + 2000 * MB + 3 * 250 * MB + 4 * 40 * MB, 80e9),
    ],
)
def test_memory_is_shown_against_what_a_rank_has(keys, needed, limit):
    plan = PlanReport.of(shared_plan(**keys))
    budget = drafted(run(**keys), SPECS, 4).memory
    assert all(budget.needed(phase) == needed(phase) for phase in budget.static)
    for phase in plan.memory.phases:
        assert plan.memory.needed_bytes(phase) == needed(phase) and plan.memory.limit == limit
        rows = [line for line in plan.render().splitlines() if line.startswith(f"  {phase.phase} ")]
        assert any(row.endswith(f" {needed(phase) / limit:.1%}") for row in rows)
    offloaded = readable_bytes(4 * plan.memory.phases[0].host)
    assert (f"{offloaded} on a node of 4 ranks" in plan.render()) == (plan.ranks.hardware == "a100")


def test_memory_by_hand():
    """float32 on 4 ranks: the actor is cut in 4 stages, the critic in 2, generation copies whole."""
    made = planned(run())
    moves, generation, inference, training = PlanReport.of(made).memory.phases
    spec = SPECS["actor"]
    whole, layer, ends = spec.parameters(), spec.layer_parameters, 512 * 64
    actor = [2 * layer + ends, 2 * layer, 2 * layer, 2 * layer + ends + 64]
    critic = [4 * layer + ends, 4 * layer + 64 + 64]
    places = [made.ranks.locate("critic", rank)[1] for rank in range(4)]
    assert places == [1, 0, 1, 0]
    fullest = 3  # of those whose phases differ by what they train: actor's last stage, critic's first
    trained = 4 * (actor[fullest] + critic[0])
    assert moves.optimizer == 8 * actor[fullest] + 8 * critic[0] // 2
    critic_copy = 4 * spec.parameters(scalar_head=True)
    standing = 6 * 512 * spec.head_dim * 4  # cosines and sines of each model that runs, of 384 tokens
    assert moves.weights == generation.weights and generation.buckets == critic_copy + standing  # beneath it
    assert moves.buckets == 4 * whole + standing  # less than 64 MiB
    assert moves.gradients == generation.gradients == inference.gradients == 0
    assert generation.weights == trained + 4 * whole
    assert generation.kv == 16 * 384 * spec.kv_bytes_per_token(4)
    assert generation.host == 4 * whole + 2 * critic_copy + guess_bytes(run().samples_per_iteration * 256)
    assert inference.weights == trained + 4 * whole + 2 * critic_copy  # reference, reward, critic; no generation copy
    longest = 4 * 384  # tokens of a micro-batch
    attention = 2 * (spec.heads + spec.kv_heads) * spec.head_dim + spec.heads  # its output's log-sums last
    layer_kept = 4 * (2 * (2 * spec.hidden + 1) + attention + 3 * spec.mlp)
    totals = []  # of training: weights, gradients, moments; the schedule's activations; what passes
    for rank, kept in enumerate(evaluate(made.likeliest).node_peak_memory):
        logits = 2 * 4 * (512 if rank == 3 else places[rank])  # and their gradient; a scalar where the critic ends
        held = 8 * (actor[rank] + critic[places[rank]]) + 8 * actor[rank] + 8 * critic[places[rank]] // 2
        totals.append(held + int(kept) + longest * (layer_kept + logits))
    assert inference.kv == 0 and training.device == max(totals) + standing
    rank = totals.index(max(totals))
    assert training.weights == training.gradients == 4 * (actor[rank] + critic[places[rank]])


def generation_of(memory):
    return next(phase for phase in memory.static if phase.phase == "generation")


def test_the_limit_of_a_rank(monkeypatch):
    assert memory_limit(run().trainer, hardware_by_name("a100"), 4, Host.here()) == (80e9, "of one a100")
    assert memory_limit(run(trainer__memory_limit_gb=3.0).trainer, hardware_by_name("a100"), 4, Host.here())[0] == 3e9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert memory_limit(run().trainer, hardware_by_name("cpu"), 16, Host.here())[0] == Host.here().memory_bytes / 8


@pytest.mark.parametrize("node, crosses", [("", False), ("4", False), ("2", True)])
def test_a_node_has_as_many_ranks_as_the_launcher_says(monkeypatch, node, crosses):
    """Where weights move, as the run's resharder has it."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", node)
    report = PlanReport.of(planned(run()))
    assert report.memory.ranks_per_node == int(node or 4)
    assert any(move.traffic.across for move in report.weight_moves) == crosses
    for bad in ("0", "four"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", bad)
        with pytest.raises(InputError, match=f"LOCAL_WORLD_SIZE='{bad}' is no number of ranks"):
            planned(run())


def test_phases_that_do_not_fit_are_refused():
    huge = {role: replace(spec, mlp=2_000_000) for role, spec in SPECS.items()}
    with pytest.raises(InputError, match=r"memory: \w+ needs .* per rank \(weights .*, host copies .*, the process"):
        drafted(run(), huge, 4)


@pytest.mark.parametrize("layout", ["d4t1p1", "d2t2p1"])
def test_the_cache_gets_what_memory_leaves(layout):
    """Room for all samples as long as there is any; then what generation leaves; less than a sample is for no run."""
    keys = {"trainer__hardware": "a100", "rollout__prompts_per_iteration": 256, "algorithm__minibatches": 64}
    keys |= {f"parallel__{row}": layout for row in ROWS} | {"trainer__offload_optimizer": "false"}
    draft = drafted(run(**keys), SPECS, 4)
    memory = before_early_loading(draft.memory)  # which gets what the cache leaves
    longest, generation = -(-(128 + 256) // 16), generation_of(memory)
    wanted = draft.batch.samples // draft.batch.instances * longest
    assert draft.generation.cache.left == 0
    assert draft.generation.limits.kv_capacity_bytes == wanted * 16 * draft.generation.limits.kv_bytes_per_token
    block_bytes, beside = generation.kv / wanted, generation.device - generation.kv + memory.process

    def limit(blocks):
        return (beside + (blocks + 0.5) * block_bytes) / (1 - memory.headroom)

    def fitting_blocks(memory):
        smaller = draft.generation.cache.fitting(generation.kv, memory.needed(generation) - memory.cap)
        return smaller and smaller.blocks

    for blocks in (wanted - 1, wanted // 2, longest + 1):
        fitting = fitting_blocks(replace(memory, limit=limit(blocks)))
        left, part = blocks - 1, wanted // 16  # a GPU's cache has a block for padding, and whole 16ths of what it wants
        assert left - part < fitting <= left and (fitting % part == 0 if left >= part else fitting == left)
    assert fitting_blocks(replace(memory, limit=limit(wanted))) is None
    for blocks in (longest, longest // 2):  # which the longest sample needs, whatever there is
        assert fitting_blocks(replace(memory, limit=limit(blocks))) == longest
    tight = drafted(run(**keys, trainer__memory_limit_gb=limit(wanted // 2) / 1e9), SPECS, 4)
    kept = tight.config.rollout.kv_blocks_per_instance
    assert kept == 7 * wanted // 16 and tight.generation.cache.blocks == kept
    assert tight.generation.limits.kv_capacity_bytes == kept * 16 * draft.generation.limits.kv_bytes_per_token
    assert tight.memory.needed(generation_of(tight.memory)) <= tight.memory.cap
    assert f"rollout.kv_blocks_per_instance = {kept}: what memory leaves" in PlanReport.of(make_plan(tight)).render()
    given = {**keys, "rollout__kv_blocks_per_instance": wanted, "trainer__memory_limit_gb": limit(wanted // 2) * 0.9e-9}
    with pytest.raises(InputError, match="memory: generation needs .* lower rollout.kv_blocks_per_instance"):
        drafted(run(**given), SPECS, 4)


def before_early_loading(memory):
    ranks = []
    for rank in memory.ranks:
        kept = [
            replace(p, weights=p.weights - sum(memory.early)) if p.phase == "generation" else p for p in rank.static
        ]
        ranks.append(replace(rank, static=tuple(kept)))
    return replace(memory, ranks=tuple(ranks), early=())


ON_GPU = dict(trainer__hardware="a100", rollout__kv_blocks_per_instance=24, rollout__max_batched_tokens=64)


def limits(peaks, draft) -> tuple[float, float, float]:
    """Memory limits in GB with room for `peaks`, for something between them and the leanest schedule, and for none."""
    least, beside = min_memory(draft.training.problem), draft.memory.training_bytes
    enough, leanest = (max(map(sum, zip(beside, activations))) for activations in (peaks, least))
    assert leanest < enough and draft.memory.fullest(least).phase == "training"
    return (enough + 1) / 1e9, (leanest + enough) / 2e9, (leanest - 1) / 1e9


def test_the_schedule_is_searched_under_the_memory_that_is_left():
    keys = {**ON_GPU, "parallel__headroom": 0.0}
    draft = drafted(run(**keys), SPECS, 4)
    enough, between, below = limits(draft.memory.most_held(make_plan(draft).likeliest), draft)
    searched = {**keys, "fusion__search_seconds": 2.0}  # long enough to find the best also on a busy machine
    free, tight = (planned(run(**searched, trainer__memory_limit_gb=limit)) for limit in (enough, between))
    assert tight.likeliest.problem.memory_cap == between * 1e9
    training = PlanReport.of(tight).memory.phases[-1]
    assert PlanReport.of(tight).memory.needed_bytes(training) <= between * 1e9
    assert PlanReport.of(free).memory.needed_bytes(PlanReport.of(free).memory.phases[-1]) > between * 1e9
    assert PlanReport.of(tight).schedule.makespan_seconds >= PlanReport.of(free).schedule.makespan_seconds
    words = r"memory: training needs .* per rank .*; the least of any schedule is .*a rank of this a100 has .*; lower "
    with pytest.raises(InputError, match=words + ".*recompute.*trainer.memory_limit_gb"):
        drafted(run(**ON_GPU, trainer__memory_limit_gb=below), SPECS, 4)


@pytest.mark.parametrize("source", ["order read from .*free.json", "serial 1F1B"])
def test_a_given_schedule_that_does_not_fit_is_refused(tmp_path, source):
    """Although a search would find one that does."""
    keys = {"fusion__intra_stage": False}
    if source != "serial 1F1B":
        save_schedule(tmp_path / "free.json", greedy(problem_of(run(**ON_GPU))))
        keys = {"fusion__schedule": str(tmp_path / "free.json")}
    draft = drafted(run(**ON_GPU, **keys), SPECS, 4)
    enough, between, _ = limits(draft.memory.most_held(draft.training.given[0][4]), draft)
    drafted(run(**ON_GPU, **keys, trainer__memory_limit_gb=enough), SPECS, 4)
    with pytest.raises(InputError, match=f"with {source}.*set fusion.intra_stage=search without fusion.schedule"):
        drafted(run(**ON_GPU, **keys, trainer__memory_limit_gb=between), SPECS, 4)
    assert PlanReport.of(shared_plan(**ON_GPU, trainer__memory_limit_gb=between)).memory.limit == between * 1e9


def test_weight_moves_are_in_the_plan():
    plan = PlanReport.of(shared_plan())
    actor, critic = plan.weight_moves
    assert plan.seconds.weight_moves == actor.seconds > 0 and critic.beneath and critic.seconds > 0
    for seconds, side in ((plan.seconds.serial, "serial"), (plan.seconds.fused, "fused")):
        parts = (getattr(plan.seconds, f"{part}_{side}") for part in ("gen_infer", "training"))
        assert seconds == pytest.approx(actor.seconds + sum(parts))
    (row,) = (line.split() for line in plan.render().splitlines() if "weights moved   " in line)
    assert row[2:] == [f"{plan.seconds.weight_moves:.4g}"] * 2
    assert (actor.source, actor.target) == ("actor_train d1t1p4", "generation d4t1p1")
    whole = 4 * SPECS["actor"].parameters()
    assert actor.traffic.stays == whole and actor.traffic.within == 3 * whole and actor.traffic.across == 0
    assert critic.traffic.stays == critic.traffic.within == 2 * 4 * SPECS["actor"].parameters(scalar_head=True)
    assert "critic_train d2t1p2 -> critic_inference d4t1p1" in PlanReport.of(shared_plan()).render()


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
    plan = PlanReport.of(shared_plan(**keys))
    assert plan.threshold.samples == expected
    assert any(reason in sentence for sentence in plan.threshold.reasons)


def test_the_plan_says_what_the_reward_function_counts(tmp_path):
    """Unknown before anything was measured; with the costs of a run it delays the predicted end."""
    file, called = tmp_path / "costs.json", dict(reward__function="rewards:slow", reward__workers=2)
    unknown = PlanReport.of(shared_plan(**called))
    assert any("reward.function takes is unknown" in sentence for sentence in unknown.reasons)
    reports = []
    for keys in ({}, called):
        made_for = facts_of(resolve_device(run(**keys)), SPECS)
        write_json(file, linear_file(reward=2.0).to_dict() | {"made_for": made_for})
        reports.append(PlanReport.of(planned(run(fusion__profile=str(file), **keys))))
    fast, slow = reports
    assert not any("reward.function" in sentence for sentence in fast.reasons)
    assert any("reward.function counts 2 s, 2 at once" in sentence for sentence in slow.reasons)
    assert slow.seconds.gen_infer_serial >= 2.0 * 16 / 2 > fast.seconds.gen_infer_serial


def test_threshold_file_is_used_and_checked(tmp_path):
    made = PlanReport.of(planned(run(), lengths=long_tail(500))).threshold.curve
    file = tmp_path / "threshold.json"
    write_json(file, to_json(made))
    plan = PlanReport.of(planned(run(fusion__threshold_file=str(file))))
    assert plan.threshold.curve == made and plan.seconds.gen_infer_fused == made.fused_seconds
    raw = json.loads(file.read_text())
    for change, message in (
        ({"instances": 8}, "made for 8 generation instances, this run has 4; calibrate again"),
        ({"samples": 128}, "of 128 samples, this run has 64"),
    ):
        file.write_text(json.dumps({**raw, **change}))
        with pytest.raises(InputError, match=message):
            planned(run(fusion__threshold_file=str(file)))


def test_schedule_file_is_used_and_checked(tmp_path):
    file = tmp_path / "schedule.json"
    save_schedule(file, serial_1f1b(problem_of(run())))
    plan = planned(run(fusion__schedule=str(file)))
    assert str(file) in PlanReport.of(plan).schedule.source
    assert PlanReport.of(plan).schedule.makespan_seconds > PlanReport.of(shared_plan()).schedule.makespan_seconds
    assert plan.likeliest.orders == serial_1f1b(problem_of(run())).orders


def slow_at(model: str, made) -> ProfiledCost:
    """A profile in which a layer of `model` takes ten times as long as one of the other."""
    return trained(made, SPECS, {role: training(0.1 if role == model else 0.01, 0.001) for role in made.trained()})


def weight_steps(plan: Plan) -> dict[int, list[tuple[int, str]]]:
    """Positions of what sums gradients and steps optimizers, by rank."""
    kinds = (Kind.TE, Kind.RG, Kind.ST)
    return {
        rank: [(place, str(i)) for place, i in enumerate(program.instructions) if i.action.kind in kinds]
        for rank, program in plan.programs[4].by_rank.items()
    }


def test_a_profile_reaches_the_programs(tmp_path):
    """The same order of computing, another model slow: reductions and steps move. The makespan is that of what runs."""
    keys = {"fusion__schedule": str(tmp_path / "schedule.json"), "fusion__profile": str(tmp_path / "profile.json")}
    save_schedule(tmp_path / "schedule.json", greedy(problem_of(run(fusion__split_backward="false"))))
    plans = {}
    for model in ("actor", "critic"):
        write_json(tmp_path / "profile.json", slow_at(model, run()).to_dict())
        plans[model] = plan = planned(run(**keys))
        times = {p.name: p for p in plan.likeliest.problem.pipelines}

        def seconds(action):
            if action.kind not in (Kind.F, Kind.B):
                return 0.0
            pipeline = times[action.pipeline]
            return (pipeline.forward if action.kind is Kind.F else pipeline.backward)[action.stage] * TICK_SECONDS

        transfer = plan.likeliest.problem.transfer * TICK_SECONDS
        spent = makespan(program_times(plan.programs[4].by_rank, plan.ranks, seconds, transfer))
        assert PlanReport.of(plan).schedule.makespan_seconds == pytest.approx(spent, rel=1e-9)
        received = Plan.parse(plan.to_text())
        assert received == plan
    assert plans["actor"].likeliest.orders == plans["critic"].likeliest.orders
    assert weight_steps(plans["actor"]) != weight_steps(plans["critic"])


def test_a_profile_reaches_the_search(tmp_path):
    orders = []
    for model in ("actor", "critic"):
        write_json(tmp_path / "profile.json", slow_at(model, run()).to_dict())
        orders.append(planned(run(fusion__profile=str(tmp_path / "profile.json"))).likeliest.orders)
    assert orders[0] != orders[1]


def test_ranks_refuse_an_iteration_that_could_hang_or_does_not_run_yet():
    plan = shared_plan()
    assert all(line in plan.summary for line in plan.iteration.lines()) and Plan.parse(plan.to_text()) == plan
    changes = (
        (0, {"takes": []}, "task actor_move: not executable yet"),
        (2, {"mesh": "0-1", "layout": "d2t1p1"}, "task critic_move: shares some of its ranks with generation"),
        (1, {"mesh": "0-1"}, "task generation: layout d4t1p1 has 4 ranks"),
        (3, {"takes": [{"field": "responses", "giver": "samples"}]}, "task reference_inference: takes responses of "),
    )
    for number, change, message in changes:
        raw = json.loads(plan.to_text())
        raw["document"]["iteration"]["tasks"][number] |= change
        with pytest.raises(InputError, match=message):
            Plan.parse(json.dumps(raw))


def test_bad_plans_are_refused():
    for raw, message in (({"version": 1}, "run: version 1 is unknown"), ({"version": 7}, "run: ranks is missing")):
        with pytest.raises(InputError, match=message):
            PlanReport.from_dict(raw, "run")


@pytest.mark.parametrize("hardware, reduce", [("cpu", "early"), ("h100", "joint")])
def test_programs_for_a_gpu_run_with_one_queue_per_rank(hardware, reduce):
    plan = planned(run(trainer__hardware=hardware))
    assert plan.programs == {4: lower(plan.likeliest, plan.ranks, reduce=reduce)}
    assert Plan.parse(plan.to_text()).programs == plan.programs
    assert verify(plan.programs[4], plan.likeliest, plan.ranks).one_queue or reduce == "early"


def test_the_start_on_gpus_by_hand():
    """bfloat16: weights, the first model's float32 main weights, gradients of the one built last; no moments yet."""
    draft = drafted(run(**ON_GPU, trainer__dtype="bfloat16"), SPECS, 4)
    spec = SPECS["actor"]
    actor, critic = 2 * spec.layer_parameters + 512 * 64, 4 * spec.layer_parameters + 128  # first stage, last stage
    rank = draft.memory.of((0, 1))
    start = rank.static[0]
    assert start.phase == "start" and start.gradients == 4 * critic
    assert start.weights == 2 * (actor + critic) and start.optimizer == 4 * actor
    assert drafted(run(), SPECS, 4).memory.ranks[0].static[0].phase == "moves"  # on CPUs
    phases = draft.memory.phases([0.0] * 4)
    assert [phase.phase for phase in phases] == ["start", "moves", "generation", "inference", "training"]


def test_a_search_begins_with_what_the_library_knows_and_keeps_what_it_finds(tmp_path):
    draft = drafted(run(fusion__library=str(tmp_path), fusion__search_seconds=0.2), SPECS, 4)
    first, second = make_plan(draft), make_plan(draft)
    assert "from a schedule of" not in PlanReport.of(first).schedule.source
    assert f"from a schedule of {tmp_path}" in PlanReport.of(second).schedule.source
    assert PlanReport.of(second).schedule.makespan_seconds <= PlanReport.of(first).schedule.makespan_seconds


def test_a_resumed_run_goes_on_in_the_order_of_its_plan(tmp_path):
    """The library is not asked; in other layouts the order is searched anew."""
    keys = dict(fusion__library=str(tmp_path / "library"), fusion__search_seconds=0.2)
    draft, file = drafted(run(**keys), SPECS, 4), tmp_path / "schedule.json"
    old = serial_1f1b(draft.training.problem)
    save_schedule(file, old)
    plan = make_plan(draft, file)
    assert plan.likeliest == old and PlanReport.of(plan).schedule.source == f"as before, from {file}"
    assert not (tmp_path / "library").exists()
    assert PlanReport.of(make_plan(draft, tmp_path / "missing.json")).schedule.source.startswith("annealed")
    other = drafted(run(**keys, fusion__actor_microbatches=2), SPECS, 4)
    assert PlanReport.of(make_plan(other, file)).schedule.source.startswith("annealed")
