"""Generation with inference: the same bits whatever R_t, whoever finishes first, migrated or not."""

import weakref
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from run_report.timeline import simulate_gen_infer
from testkit.inter_stage_case import Case, clean_up, iterate, write_models
from testkit.programs import eventually
from testkit.sim_helpers import limits, linear_cost

from rlhfuse.costs.fits import Line
from rlhfuse.costs.forms.form import Form
from rlhfuse.simulator.lengths import SampleLengths

LENGTHS = {
    "long tail": (3, 5, 2, 4, 6, 3, 60, 4, 5, 2, 3, 7, 4, 44, 3, 5),
    "the last instance works alone": (2,) * 12 + (40,) * 4,
    "the first instance works alone": (40,) * 4 + (2,) * 12,
    "all end at the trigger": (20,) * 16,
    "one sample": (30,),
    "two samples on four instances": (12, 31),
}
STAIRS = (20, 15, 25, 10, 30, 17, 22, 12, 50, 5, 60, 6, 7, 55, 45, 65)
IN_STEP = dict(in_step=True, guesses=False)


@pytest.fixture(scope="module")
def run(workers, tmp_path_factory):
    folders = write_models(tmp_path_factory.mktemp("models"))
    numbers, serial = count(), {}

    def call(case, disturb=None, all_ranks=False):
        results = workers.run(partial(iterate, disturb=disturb), folders, case, next(numbers))
        assert len({one["digest"] for one in results}) == 1 and len({one["plan"] for one in results}) == 1
        return results if all_ranks else results[0]

    def serial_result(case):
        case = replace(case, threshold=0, by="kv", in_step=False, blocks=80, bs_max=8, bucket_bytes=64 << 20)
        if case not in serial:
            result = call(case)
            assert result["lengths"] == list(case.lengths) and result["plan"] == "None"
            serial[case] = result
        return serial[case]

    call.serial = serial_result
    call.serial_digest = lambda case: serial_result(case)["digest"]
    yield call
    workers.run(clean_up)


@pytest.mark.parametrize("name", LENGTHS)
def test_every_threshold_gives_the_bits_of_the_serial_run(run, name):
    lengths = LENGTHS[name]
    all_of_them = len(lengths)
    moved_by_cache = {-(-all_of_them // 2), all_of_them} - {1}
    for trigger, by in sorted({(1, "tokens"), (all_of_them, "tokens"), *((some, "kv") for some in moved_by_cache)}):
        case = Case(lengths, trigger, by=by)
        assert run(case)["digest"] == run.serial_digest(case), trigger


@pytest.mark.parametrize("by", ["kv", "tokens"])
def test_what_a_migration_reports(run, by):
    case = Case(STAIRS, 6, by=by, bs_max=4, **IN_STEP)
    result = run(case, disturb=stand_still)
    report = result["report"]
    assert result["digest"] == run.serial_digest(case) and len(report.plan.destinations) == 2
    assert report.scored_before_generation_end >= len(STAIRS) - 6
    assert report.migrated_samples == len(report.plan.moves) >= 1
    assert report.recomputed_samples == (0 if by == "kv" else report.migrated_samples)
    assert report.migrated_bytes == report.bytes_needed and (report.bytes_needed > 0) == (by == "kv")


@pytest.mark.parametrize("inference", ["d4t1p1", "d2t2p1"])
def test_tensor_parallel_instances_act_on_the_trigger_together(run, inference):
    for threshold, by in ((6, "kv"), (16, "tokens")):
        case = Case(STAIRS, threshold, by=by, layout="d2t2p1", inference=inference, in_step=True, bs_max=16)
        result = run(case)
        assert result["digest"] == run.serial_digest(case)
        assert result["report"].migrated_samples >= 1


WIDE = ("d4t1p1", "d2t2p1", ""), ("d4t1p1", "d4t1p1", "d2t2p1")


@pytest.mark.parametrize("layout, inference, reward", WIDE)
def test_workers_wider_than_instances_give_the_bits_of_the_serial_run(run, layout, inference, reward):
    """Models that are narrower than the widest one share a pack; whichever instances go on decoding."""
    case = Case(STAIRS, layout=layout, inference=inference, reward=reward)
    for threshold, by, lengths in ((6, "kv", STAIRS), (16, "tokens", STAIRS), (4, "kv", (2,) * 12 + (40,) * 4)):
        case = replace(case, threshold=threshold, by=by, lengths=lengths, bs_max=4 if threshold == 6 else 8)
        result = run(case)
        assert result["digest"] == run.serial_digest(case) and result["report"].plan
    narrow = run.serial(replace(case, inference=layout, reward=""))["rollouts"]
    for one, other in zip(result["rollouts"], narrow):  # sums over tensor ranks are in another order
        assert one.score == pytest.approx(other.score, abs=1e-5) and one.values.allclose(other.values, atol=1e-5)


@pytest.mark.parametrize(
    "scorers, function",
    [(("reference", "reward"), True), (("reward",), False), (("reference",), True), (("reward",), True), ((), True)],
)
def test_a_run_scores_with_what_it_has(run, scorers, function):
    whole = run.serial(Case(STAIRS))["rollouts"]
    case = Case(STAIRS, 6, scorers=scorers, function_reward=function)
    results = run(case, all_ranks=True)
    assert results[0]["digest"] == run.serial_digest(case)
    for full, one in zip(whole, results[0]["rollouts"]):
        assert one.old_logprobs.equal(full.old_logprobs) and one.values is None
        assert (one.ref_logprobs is not None) == ("reference" in scorers)
        assert one.ref_logprobs is None or one.ref_logprobs.equal(full.ref_logprobs)
        assert one.score == (full.score if "reward" in scorers else None)
    said = {one.sample_id: sum(one.response_tokens) / len(one.response_tokens) for one in whole}
    assert all(one["report"].function_scores == (said if function else {}) for one in results)
    if function:  # asked while generation goes on, not at its end
        assert sum(one["submitted"] for one in results) > len(results)


# what happened ------------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_move_in_small_buckets_and_send_it_once(run):
    """Twenty prompt tokens are two full blocks; the four samples of an instance have them in common."""
    case = Case((20,) * 16, 16, one_prompt=True, bucket_bytes=1)
    result = run(case)
    report = result["report"]
    assert result["digest"] == run.serial_digest(case) and report.recomputed_samples == 0
    moves = report.plan.moves
    pairs = {(move.source, move.destination) for move in moves}
    blocks = sum(-(-move.kv_tokens // 8) for move in moves)
    assert len(moves) > len(pairs)
    assert report.bytes_needed == (blocks - 2 * (len(moves) - len(pairs))) * result["block_bytes"]
    # each destination has decoded the same prompt itself
    assert report.migrated_bytes == (blocks - 2 * len(moves)) * result["block_bytes"]


def test_observations_are_of_all_that_was_done(run):
    fused = run(Case(AT_ONCE, 20, bs_max=7, **IN_STEP))["report"].observations
    assert {row[2] > 0 for row in fused["step"]} == {False, True} and fused["migration"]
    assert sum(samples for _, samples, _ in fused["score"]) == 32
    assert all(kv_bytes > 0 < seconds for kv_bytes, seconds in fused["migration"])
    serial = run.serial(Case(STAIRS))["report"].observations
    assert serial["step"] and not serial["migration"] and len(serial["load"]) == 4
    for seen in (fused, serial):
        assert all(row[0] > 0 for kind in ("load", "release") for row in seen[kind])
        assert len(seen["release"]) == 4 and len(seen["meeting"]) == 1


def test_several_waiting_samples_of_the_tail_are_scored_together(run):
    lengths = (2,) * 8 + (30,) * 16  # six of each of the last two instances end in one step, for four workers
    report = run(Case(lengths, 16, score_tokens=512, bs_max=16, **IN_STEP))["report"]
    assert report.plan and any(row[1] > 1 and row[0] > 30 * row[1] for row in report.observations["score"])


# as simulated ---------------------------------------------------------------------------------------------


SHORT, LONG = 2, 80
AT_ONCE = (LONG,) * 8 + (SHORT,) * 6 + (LONG,) * 2 + (SHORT,) * 7 + (LONG,) + (SHORT,) * 7 + (LONG,)


def facts_of(plan, first=0):
    """What a plan decides, samples counted from the `first`. Their tokens by then, and with them who goes to which of
    the destinations, depend on when exactly they met."""
    moves = sorted((move.sample_id - first, move.source, move.mode) for move in plan.moves)
    return plan.destinations, plan.freed, [sample - first for sample in plan.stays], moves


def test_the_migration_is_that_of_the_simulation(run):
    """Twelve long samples are left at once."""
    case = Case(AT_ONCE, 20, bs_max=7, **IN_STEP)
    report = run(case)["report"]
    prompts = tuple(len(request.prompt) for request in case.requests())
    lim = limits(bs_max=7, block_tokens=8, kv_capacity_bytes=640 * 100.0, max_prompt_tokens=9, max_output_tokens=LONG)
    costs = replace(
        linear_cost(), transfer=Form.of_line(Line(0.0, (1e-12,)))
    )  # a cache is always quicker than a prefill
    plan = simulate_gen_infer(SampleLengths(prompts, AT_ONCE), 4, costs, lim, 20).plan
    assert facts_of(report.plan, first=1000) == facts_of(plan) and report.plan.moves


# memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [9, 16])
def test_a_destination_without_room_loses_nothing(run, blocks):
    """A sequence at full length takes up to 9 blocks: then one runs at a time, and all the others wait."""
    case = Case(STAIRS, 8, blocks=blocks, **IN_STEP)
    result = run(case)
    assert result["digest"] == run.serial_digest(case)
    report = result["report"]
    assert report.migrated_samples >= 1
    assert report.recomputed_samples >= 1  # what finds no room moves as tokens and waits
    assert report.recomputed_samples < report.migrated_samples or blocks == 9


# independence ----------------------------------------------------------------------------------------------


def stand_still(stage, scorer, made, case, store):
    """Destinations take no step after the migration before everything that was finished by then is scored."""
    from rlhfuse.fusion.inter import inter_stage

    execute, score, step = inter_stage.execute_migration, scorer.score, made.engine.step
    share = len(made.placement.workers[made.placement.worker_of(made.rank)])
    known = []

    def moving(plan, *more):
        done = execute(plan, *more)
        known.append(len(case.lengths) - len(plan.moves) - len(plan.stays))
        return done

    def standing():
        eventually(lambda: not known or store.add("scored", 0) >= known[0] * share)
        return step()

    def counting(rollouts, worker):
        out = score(rollouts, worker)
        store.add("scored", len(rollouts))
        return out

    inter_stage.execute_migration, scorer.score, made.engine.step = moving, counting, standing


@pytest.mark.parametrize("layout, inference", [("d4t1p1", "d4t1p1"), ("d2t2p1", "d4t1p1"), ("d2t2p1", "d2t2p1")])
def test_freed_instances_score_while_destinations_stand_still(run, layout, inference):
    lengths = (3, 5, 2, 4, 6, 3, 60, 4, 5, 2, 3, 7, 4, 44, 3, 50)
    case = Case(lengths, 4, layout=layout, inference=inference, **IN_STEP)
    result = run(case, disturb=stand_still)
    report = result["report"]
    left = len(report.plan.moves) + len(report.plan.stays)
    assert report.scored_before_generation_end >= len(lengths) - left > 0
    assert result["digest"] == run.serial_digest(case)


def refuse_weights_beside_a_cache(stage, scorer, made, case, store):
    """Loading a model fails while this rank has keys and values, or anybody still holds their memory."""
    engine = made.engine
    keys, values = weakref.ref(engine._cache.keys), weakref.ref(engine._cache.values)
    assert engine._cache is not None

    def loading(load):
        if engine._cache is not None or keys() is not None or values() is not None:
            raise MemoryError("weights come in beside keys and values")
        load()

    for model in made.frozen.values():
        model.offloaded.load = partial(loading, model.offloaded.load)


@pytest.mark.parametrize("threshold", [0, 8])
def test_a_freed_instance_has_given_its_cache_back_before_weights_come_in(run, threshold):
    case = Case(LENGTHS["long tail"], threshold)
    result = run(case, disturb=refuse_weights_beside_a_cache)
    assert run(case)["digest"] == result["digest"]
