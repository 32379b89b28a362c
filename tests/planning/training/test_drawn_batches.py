"""Micro-batches of a plan: those that the run's own cut of drawn lengths gives, and what they change."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.four_ranks import SPECS, drafted, on_slow_cores, run
from testkit.profiles import examples
from testkit.sim_helpers import equal, long_tail

from rlhfuse.base.errors import InputError
from rlhfuse.planning.planned_lengths import assumed_lengths
from rlhfuse.planning.training import drawn_batches
from rlhfuse.planning.training.drawn_batches import DRAWS, DrawnBatches
from rlhfuse.planning.training.training_problem import equal_microbatch
from rlhfuse.schedule.bounds.bounds import latency_bound
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.tasks.balance import deal, split_minibatches
from rlhfuse.tasks.microbatch_cut import MicrobatchCut

TAIL = long_tail(400, longest=256)
seeds = st.integers(0, 9)


def by_hand(drawn: DrawnBatches, cut: MicrobatchCut, depth: int) -> dict[int, list[float]]:
    """Tokens of the micro-batch of each mini-batch, by M1, with the functions that a run calls."""
    found: dict[int, list[float]] = {}
    for batch in drawn.trained or drawn.batches:
        lengths, spared = [p + o for p, o in zip(batch.prompt, batch.output)], batch.spared or [False] * len(batch)
        for part in split_minibatches(len(batch), drawn.minibatches, drawn.seed, 0):
            own = [lengths[i] for i in part]
            parts = cut.split(own, {place for place, i in enumerate(part) if spared[i]})
            weights = [sum(own[i] for i in micro) for micro in parts]
            rows = [deal(weights, cut.pipelines, k) for k in range(cut.pipelines)]
            slowest = max(sum(row) + (depth - 1) * max(row) for row in rows)
            found.setdefault(cut.rung_of(parts), []).append(slowest / (len(rows[0]) + depth - 1))
    return found


@examples(60)
@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 600, 900]), st.integers(1, 8), seeds)
def test_a_microbatch_is_what_the_runs_own_cut_takes(minibatches, pipelines, many, depth, seed):
    """`many`: micro-batches of a pipeline, or from 300 tokens each."""
    drawn, samples = DrawnBatches(TAIL.draw(32, 3, seed), minibatches, seed), 32 // minibatches
    if many < 300 and pipelines * many > samples:
        return
    sizes = many, pipelines, samples, 300
    cut = MicrobatchCut.by_tokens(*sizes) if many >= 300 else MicrobatchCut.by_samples(*sizes)
    wanted, shares = by_hand(drawn, cut, depth), drawn.rungs(cut)
    assert Counter(drawn.rung_of_each(cut)) == {rung: len(tokens) for rung, tokens in wanted.items()}
    assert shares == pytest.approx({rung: len(wanted[rung]) / (3 * minibatches) for rung in sorted(wanted)})
    everything = sum(sum(batch.prompt) + sum(batch.output) for batch in drawn.batches)
    for rung, tokens in wanted.items():
        micro = drawn.microbatch(cut, rung, pipelines, depth)
        assert micro.tokens == pytest.approx(sum(tokens) / len(tokens))
        assert micro.sequences == pytest.approx(micro.tokens * 3 * 32 / everything)
        assert micro.outputs == pytest.approx(
            micro.tokens * sum(map(sum, (b.output for b in drawn.batches))) / everything
        )
    for rung in set(cut.rungs) - wanted.keys():
        assert drawn.microbatch(cut, rung, pipelines, depth).tokens == cut.tokens, "none is drawn: full ones"


@pytest.mark.parametrize("tokens", [0, 600])
def test_what_training_leaves_out_takes_no_time(tokens):
    """Half of the samples, which have a third of the tokens, by the last iterations of a run of other lengths."""
    seen = SampleLengths((10,) * 40, (190, 90) * 20, spared=(False, True) * 20)
    every, same = replace(seen, spared=()), equal(9, 10, 100)
    whole, fewer, plain = (DrawnBatches.of(same, 64, 2, 7, some) for some in ([every], [seen, seen], ()))
    assert whole.batches == fewer.batches == plain.batches and not plain.trained
    assert fewer.trained == seen.draw(64, 1, 7) + seen.draw(64, 1, 8)
    assert all(len(batch.trained) == 32 for batch in fewer.trained)
    cut = MicrobatchCut.by_tokens(tokens, 2, 32, 200) if tokens else MicrobatchCut.by_samples(4, 2, 32, 200)
    wanted = by_hand(fewer, cut, 3)
    assert Counter(fewer.rung_of_each(cut)) == {rung: len(made) for rung, made in wanted.items()}
    for rung, made in wanted.items():
        micro = fewer.microbatch(cut, rung, 2, 3)
        assert micro.tokens == pytest.approx(sum(made) / len(made))
        assert micro == pytest.approx((micro.tokens, micro.tokens / 200, 0.95 * micro.tokens))
    if tokens:
        rungs = (sum(rung * share for rung, share in drawn.rungs(cut).items()) for drawn in (fewer, whole))
        assert next(rungs) < 0.9 * next(rungs), "fewer micro-batches"


def test_batches_without_any_gradient_are_priced_with_what_fills_micro_batches():
    lengths = SampleLengths((10,) * 8, (10, 20, 30, 40) * 2, spared=(True,) * 8)
    micro = DrawnBatches((lengths,), 1, 0).microbatch(by_samples(8, 1, 2), 2, 1, 1)
    assert micro == pytest.approx((20.0, 20 / 35, 20 * 25 / 35))


def by_samples(samples: int, pipelines: int, microbatches: int) -> MicrobatchCut:
    return MicrobatchCut.by_samples(microbatches, pipelines, samples, 1)


def test_samples_that_do_not_divide_make_some_heavier():
    drawn = DrawnBatches((equal(10, 0, 10),), 1, 0)
    micro = drawn.microbatch(by_samples(10, 1, 4), 4, 1, 2)  # 3 + 3 + 2 + 2 samples, and 3 once more, in five steps
    assert micro == pytest.approx((26.0, 2.6, 26.0))


def test_what_was_cut_once_is_not_cut_again(monkeypatch):
    drawn, asked, cut = DrawnBatches(TAIL.draw(64, 2, 1), 4, 1), [], by_samples(16, 2, 4)
    split = drawn_batches.split_microbatches
    monkeypatch.setattr(drawn_batches, "split_microbatches", lambda *cutting: asked.append(1) or split(*cutting))
    for pipelines, depth in ((2, 1), (2, 4), (4, 4), (4, 4)):
        drawn.microbatch(cut, 4, pipelines, depth)
    drawn.rungs(replace(cut, tokens=cut.tokens + 1))  # cuts alike
    assert len(asked) == 2 * 4


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(InputError, match="8 samples cannot fill 9 micro-batches"):
        DrawnBatches((equal(16, 1, 1),), 2, 0).microbatch(by_samples(8, 3, 3), 3, 3, 1)


def test_a_draft_prices_and_predicts_the_same_batches():
    made, unknown = (drafted(run(fusion__split_backward="false"), SPECS, 4, lengths) for lengths in (TAIL, None))
    assert made.inputs.drawn.batches == TAIL.clip(128, 256).draw(64, DRAWS, made.config.trainer.seed)
    assert unknown.inputs.drawn.batches == assumed_lengths(128, 256).draw(64, DRAWS, unknown.config.trainer.seed)
    for share in made.ranks.shape.shares:
        micro = equal_microbatch(made.inputs.drawn, made.batch, 4, share)
        assert micro == made.inputs.drawn.microbatch(made.batch.cut, 4, share.layout.dp, share.layout.pp)
        whole = made.analytic[f"{share.model}_train"].stage_costs(micro)
        pipeline = next(p for p in made.training.problem.pipelines if p.model == share.model)
        assert pipeline.forward == whole.forward and pipeline.backward == whole.backward


@pytest.mark.parametrize("critic, depth", [("d1t1p4v2", 4), ("d1t2p2", 2), ("d2t1p2", 1)])
def test_a_pipeline_is_as_deep_as_it_has_nodes(critic, depth):
    """Chunks add none, and stages that are merged on one node are one; d2t1p2 is merged beside an actor of tp 2."""
    actor = {"d2t1p2": "d1t2p2"}.get(critic, "d1t1p4" if "v2" in critic else "d1t2p2")
    draft = drafted(run(parallel__actor_train=actor, parallel__critic_train=critic), SPECS, 4, TAIL)
    share = draft.ranks.shape.share("critic")
    wanted = draft.inputs.drawn.microbatch(draft.batch.cut, 4, share.layout.dp, depth)
    assert equal_microbatch(draft.inputs.drawn, draft.batch, 4, share) == wanted


def mean_tokens(drawn: DrawnBatches, cut: MicrobatchCut, rung: int, *_: int) -> float:
    """Tokens of a micro-batch, as if samples could be split."""
    return drawn.tokens / (drawn.minibatches * cut.pipelines * rung)


def test_the_real_cut_chooses_other_microbatches_than_the_mean(monkeypatch):
    """Many micro-batches leave the longest sample alone in one, for which each stage of the pipeline waits."""
    on_slow_cores(monkeypatch)
    drafts = {m: drafted(run(fusion__actor_microbatches=m), SPECS, 4, TAIL) for m in (2, 4, 8, 16)}
    real = {m: float(latency_bound(draft.training.problem)) for m, draft in drafts.items()}
    monkeypatch.setattr(DrawnBatches, "_tokens", mean_tokens)
    again = {m: replace(draft.work, drawn=replace(draft.inputs.drawn)) for m, draft in drafts.items()}
    mean = {m: float(latency_bound(work.problem(m, drafts[m].training.split.models))) for m, work in again.items()}
    chosen, believed = min(real, key=real.__getitem__), min(mean, key=mean.__getitem__)
    assert chosen < believed and real[believed] > 1.01 * real[chosen]


def test_groups_that_are_drawn_again_are_generated_and_not_trained_on():
    lengths = SampleLengths(tuple(range(1, 101)), tuple(range(101, 201)))
    drawn = DrawnBatches.of(lengths, 40, 2, 1, begun=1.5)
    assert {len(batch) for batch in drawn.batches} == {60} and {len(batch) for batch in drawn.trained} == {40}
    assert all(many.output[:40] == few.output for many, few in zip(drawn.batches, drawn.trained))
    assert DrawnBatches.of(lengths, 40, 2, 1) == DrawnBatches.of(lengths, 40, 2, 1, begun=1.0)
