"""Files of costs: a profile, profiles by tensor degree, or what a run measured of itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhfuse.base.json_values import read_json
from rlhfuse.config.role import Role
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.cost_model import CostModel
from rlhfuse.costs.measured import MeasuredCost
from rlhfuse.costs.profiled import ProfiledCost, made_for
from rlhfuse.costs.tensor_profiles import KIND, TensorProfiles


def load_costs(path: str | Path) -> CostModel | TensorProfiles:
    """profile.json of tools/profile_costs.py or the costs.json of a run. Raises InputError naming the file."""
    raw = read_json(path)
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if kind == KIND:
        return TensorProfiles.from_dict(raw, str(path))
    return (ProfiledCost if kind == "profile" else MeasuredCost).from_dict(raw, str(path))


def load_run_costs(config: RunConfig, specs: Mapping[Role, ModelSpec], path: str | Path = "") -> CostModel:
    """What `path`, default fusion.profile, holds. Raises InputError, also for a profile of other models or settings."""
    file = path or config.fusion.profile
    return run_costs(load_costs(file), config, specs, str(file))


def run_costs(
    costs: CostModel | TensorProfiles, config: RunConfig, specs: Mapping[Role, ModelSpec], where: str = ""
) -> CostModel:
    """What was loaded from `where`, default fusion.profile, for the layouts of `config`. Raises InputError as above."""
    where = where or config.fusion.profile
    if isinstance(costs, TensorProfiles):
        costs = costs.of(config, where)
    if isinstance(costs, ProfiledCost):
        costs.check(made_for(config, specs), where)
    return costs
