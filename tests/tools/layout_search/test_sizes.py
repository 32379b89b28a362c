"""How many ranks to take: each number is a search of its own, and what does not fit says why."""

import pytest
from layout_search.sizes import render_sizes, sizes_of
from mpi_ranks import MpiRanks
from testkit.search_cases import GPUS, LARGE_SPECS, everything, setting

from rlhfuse.planning.job import Job
from rlhfuse.planning.search.search import Ranking

KEYS = dict(**GPUS, trainer__memory_limit_gb=40, fusion__actor_microbatches=1)


def test_each_number_of_ranks_has_its_best_table_and_what_a_sample_costs():
    config = everything(**KEYS)
    sizes = sizes_of(Job(config, LARGE_SPECS, 4), [1, 4, 8], MpiRanks())
    assert [(size.world_size, size.row is None) for size in sizes] == [(1, True), (4, False), (8, False)]
    assert "lacks" in sizes[0].why_not and sizes[0].rank_seconds is None
    for size in sizes[1:]:
        assert size.row == Ranking(setting(size.world_size, LARGE_SPECS, **KEYS)).fastest(1).best
        assert size.rank_seconds == pytest.approx(size.world_size * size.row.seconds / config.samples_per_iteration)
        values = size.to_dict()
        assert values["samples_per_second"] * values["rank_seconds_per_sample"] == pytest.approx(size.world_size)
        assert values["overrides"] == list(size.row.table.overrides()) and values["why_not"] is None
    assert sizes[0].to_dict() == {"world_size": 1, "why_not": sizes[0].why_not}


def test_the_cheapest_and_the_fastest_are_named():
    sizes = sizes_of(Job(everything(**KEYS), LARGE_SPECS, 4), [8, 1, 4], MpiRanks())
    head, *lines = render_sizes(sizes).splitlines()
    assert head.split()[:2] == ["ranks", "seconds"] and [line.split()[0] for line in lines[:3]] == ["8", "4", "1"]
    fitting = [size for size in sizes if size.row]
    cheapest = min(fitting, key=lambda size: size.rank_seconds)
    fastest = min(fitting, key=lambda size: size.row.seconds)
    assert lines[-2].startswith(f"cheapest of a sample: {cheapest.world_size} ranks, {cheapest.rank_seconds:.3g} ")
    assert lines[-1].startswith(f"fastest: {fastest.world_size} ranks, {fastest.row.seconds:.4g} s")


def test_a_row_that_is_given_fits_one_number_alone():
    sizes = sizes_of(Job(everything(parallel__generation="d2t1p1"), LARGE_SPECS, 4), [3, 4], MpiRanks())
    assert all(size.row is None and "parallel.generation=d2t1p1" in size.why_not for size in sizes)
    assert "cheapest" not in render_sizes(sizes) and len(render_sizes(sizes).splitlines()) == 2
