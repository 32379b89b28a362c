"""Weights of models that score come in while the last samples decode: nothing else changes, and nothing is left."""

import time
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
from testkit.inter_stage_case import Case, clean_up, inter_stage, iterate, write_models

LENGTHS = (3, 5, 2, 4, 6, 3, 60, 4, 5, 2, 3, 7, 4, 44, 3, 5)


@pytest.fixture(scope="module")
def run(workers, tmp_path_factory):
    folders, numbers = write_models(tmp_path_factory.mktemp("models")), count()
    yield lambda work, case, **more: workers.run(partial(work, **more), folders, case, next(numbers))
    workers.run(clean_up)


def watched(rank, folders, case, number):
    """The iteration; also, of each time that loading began here: how many models, and the samples left to decode."""
    begun = []

    def watch(stage, scorer, made, case, store):
        begin = scorer.begin_load

        def begin_load(most=None):
            before = sum(loader.count for loader in scorer._loaders)
            begin(most)
            if more := sum(loader.count for loader in scorer._loaders) - before:
                begun.append((more, made.engine.samples, made.engine._cache is not None))

        scorer.begin_load = begin_load

    result = iterate(rank, folders, case, number, disturb=watch)
    return result["digest"], begun, result["report"].plan


@pytest.mark.parametrize("early", [1, 2, 3])
def test_serial_instances_load_once_nothing_waits(run, early):
    case = Case(LENGTHS, in_step=True, guesses=False)
    digest = {one[0] for one in run(watched, case)}
    results = run(watched, replace(case, early_models=early))
    assert {one[0] for one in results} == digest and len(digest) == 1
    for _, begun, _ in results:
        assert begun[0] == (early, begun[0][1], True)
        assert begun[1:] == ([(3 - early, 0, False)] if early < 3 else [])
    assert max(begun[0][1] for _, begun, _ in results) > 0


def test_without_room_they_come_when_the_cache_has_gone(run):
    for _, begun, _ in run(watched, Case(LENGTHS)):
        assert begun == [(3, 0, False)]


def test_who_decodes_the_tail_loads_meanwhile(run):
    case = Case(LENGTHS, 2, in_step=True, guesses=False)
    (digest,) = {one[0] for one in run(watched, replace(case, threshold=0))}
    results = run(watched, replace(case, early_models=3))
    plan = results[0][2]
    assert {one[0] for one in results} == {digest} and plan.destinations and plan.freed
    for rank, (_, begun, _) in enumerate(results):
        ((models, left, in_cache),) = begun
        assert models == 3 and in_cache == (left > 0) == (rank in plan.destinations)


def fail_while_decoding(rank, folders, case, number):
    """All ranks fail once weights are there; returns what of them is left."""
    stage, scorer, made = inter_stage(rank, folders, case, number)
    step, loaded = made.engine.step, []

    def broken():
        if scorer._loaders:
            scorer._loaders[0].wait(case.early_models - 1)
            loaded.append(sum(model.offloaded.loaded for model in made.frozen.values()))
            raise FloatingPointError("made up")
        time.sleep(0.001)
        return step()

    made.engine.step = broken
    with pytest.raises(FloatingPointError, match="made up"):
        stage.run(0, case.requests(), 0, case.limits())
    return loaded, [model.offloaded.loaded for model in made.frozen.values()], len(scorer._loaders)


def test_a_failure_releases_them(run):
    case = Case((40,) * 16, early_models=2, blocks=81)  # no other test's engine
    assert run(fail_while_decoding, case) == [([2], [False] * 3, 0)] * 4
