"""Coprime pipelines on six ranks: the actor's two of three stages against the critic's three of two."""

from __future__ import annotations

import pytest
from testkit.against_whole import References, write_models
from testkit.training_case import Case, run_case
from testkit.workers import Workers


@pytest.fixture(scope="module")
def six():
    pool = Workers(6)
    yield pool
    pool.close()


def test_two_pipelines_of_three_stages_with_three_of_two(six, tmp_path):
    models = write_models(tmp_path)
    folders = {"actor": models["actor"], "critic": models["five"]}
    case = Case({"actor": "d2t1p3", "critic": "d3t1p2"}, folders, microbatches=3)
    assert [share.pipelines for share in case.ranks.shape.shares] == [2, 3]
    fused, serial = (run_case(six, case.but(schedule=name)) for name in ("fused", "serial"))
    assert fused.digests == serial.digests
    assert fused.losses == serial.losses
    References().check(fused)
