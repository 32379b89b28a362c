"""Profiles by tensor degree: each task's grids come from its own degree, and what was not measured is not priced."""

import re
from dataclasses import replace

import pytest
from testkit.flat_profile import of_degree
from testkit.paths import ROOT

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import write_json
from rlhfuse.config.load import load_config, read_specs
from rlhfuse.costs.profile_files import TensorProfiles, load_costs, run_costs
from rlhfuse.costs.profiled import ProfiledCost
from rlhfuse.decisions.layouts import given_tasks

TINY = ROOT / "examples" / "tiny"
BASE = [f"actor.path={TINY}/actor", f"reward.path={TINY}/reward", "trainer.device=cpu", "fusion.least_threshold=0"]


def config_of(**parallel: str):
    tasks = dict(generation="d2t2p1", actor_train="d1t1p4", critic_train="d1t2p2")
    tasks |= {f"{role}_inference": "d4t1p1" for role in ("reference", "critic", "reward")}
    settings = [f"parallel.{task}={layout}" for task, layout in (tasks | parallel).items()]
    return load_config(ROOT / "examples" / "quickstart.yaml", [*BASE, *settings])


def tasks_of(config):
    return given_tasks(config.parallel, config.roles(), 4)


def profile(degree: int) -> ProfiledCost:
    """All of whose seconds are the degree."""
    config = config_of()
    return of_degree(config, read_specs(config), degree)


def refused(folder, profiles) -> str:
    """What a run is told that is given these profiles."""
    write_json(folder / "p.json", TensorProfiles(tuple(profiles)).to_dict())
    config = config_of()
    with pytest.raises(InputError) as caught:
        run_costs(load_costs(folder / "p.json"), config.trainer, tasks_of(config), read_specs(config), "p.json")
    return str(caught.value)


def test_each_task_is_priced_by_the_profile_of_its_degree(tmp_path):
    config, file = config_of(), tmp_path / "profile.json"
    profiles = TensorProfiles((profile(1), profile(2)))
    write_json(file, profiles.to_dict())
    assert load_costs(file) == profiles and profiles.degrees == (1, 2)
    costs = run_costs(load_costs(file), config.trainer, tasks_of(config), read_specs(config), str(file))
    assert costs.decode_step_seconds(1, 1) == 2 and costs.migration_seconds(1) == 2
    assert costs.score_seconds(2, 2) == 3.0 and costs.swap_in == 1.0  # three scorers of degree 1
    assert {role: grids.tp for role, grids in costs.training.items()} == {"actor": 1, "critic": 2}
    known = profiles.of(tasks_of(config)).made_for
    assert known["generation_tp"] == 2 and known["reward_inference_tp"] == 1


def test_a_degree_that_was_not_measured_is_refused_by_name():
    with pytest.raises(InputError) as caught:
        TensorProfiles((profile(1),)).of(tasks_of(config_of()), "p.json")
    assert str(caught.value) == (
        "p.json has tensor degrees 1, parallel.generation=d2t2p1 needs 2; run tools/profile_costs.py --tensor 1,2 "
        "with this config"
    )


def test_profiles_of_other_models_are_refused(tmp_path):
    """Or made for a run without a critic, and given to one that has it."""
    measured = profile(1), profile(2)
    other = [replace(one, made_for={**one.made_for, "actor": "1 layer"}) for one in measured]
    assert "p.json was made for actor=1 layer, this run has" in refused(tmp_path, other)
    bare = []
    for one in measured:
        facts = {key: value for key, value in one.made_for.items() if not key.startswith("critic")}
        score, training = ({r: g for r, g in grids.items() if r != "critic"} for grids in (one.score, one.training))
        bare.append(replace(one, made_for=facts, score=score, training=training))
    assert re.search("p.json was made for critic=None, this run has .* layers", refused(tmp_path, bare))
