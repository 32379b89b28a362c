"""Every pair of layouts trains as one process would: losses, gradients and weights against the whole models.

The reference is in float64, so what is measured is the rounding of the distributed run alone; a float32 run in one
process is as far away (`test_float32_in_one_process_is_no_closer`).
"""

from __future__ import annotations

import pytest
import torch
from training_case import Case, Recording, distance, make_batch, run_case, write_model
from whole_model import ADAM, SGD, ReferenceStep, train_whole

PAIRS = [
    ("d1t1p4", "d2t1p2"),
    ("d2t1p2", "d1t1p4"),
    ("d4t1p1", "d2t1p2"),
    ("d1t2p2", "d2t1p2"),
    ("d1t1p4", "d1t2p2"),
    ("d2t1p2", "d2t1p2"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        "actor": write_model(base / "actor", seed=1),
        "critic": write_model(base / "critic", scalar_head=True, seed=2),
        "five": write_model(base / "five", seed=3, num_hidden_layers=5),
        "tied": write_model(base / "tied", seed=5, num_hidden_layers=5, tie_word_embeddings=True),
        "five critic": write_model(base / "five-critic", scalar_head=True, seed=4, num_hidden_layers=5),
    }


@pytest.fixture(scope="module")
def references(folders):
    """The whole model trained once per (folder, recipe) of this file."""
    known: dict = {}

    def get(case: Case, model: str, dtype=torch.float64) -> list[ReferenceStep]:
        key = case.folders[model], case.recipe, case.steps, dtype
        if key not in known:
            head = model == "critic"
            batches = [make_batch(number, case.samples) for number in range(case.steps)]
            known[key] = train_whole(key[0], batches, case.recipe, scalar_head=head, dtype=dtype)
        return known[key]

    return get


def check(run: Recording, references) -> dict[str, float]:
    """Hold a recording against the reference; returns the measured distances."""
    case, found = run.case, {}
    for model in case.layouts:
        steps = references(case, model)
        parts = [case.parts(number) for number in range(case.steps)]
        wanted = {
            (model, number, k): float(steps[number].losses[part].sum())
            for number in range(case.steps)
            for k, part in enumerate(parts[number])
        }
        mine = {key: loss for key, loss in run.losses.items() if key[0] == model}
        assert mine.keys() == wanted.keys()
        largest = max(map(abs, wanted.values()))
        found[f"{model} losses"] = max(abs(mine[key] - wanted[key]) for key in wanted) / largest
        found[f"{model} gradients"] = distance(run.gradients[model], steps[0].gradients, relative=True)
        found[f"{model} weights"] = distance(run.weights[model], steps[-1].weights, relative=False)
        norms = [abs(run.norms[number][model] / step.norm - 1) for number, step in enumerate(steps)]
        found[f"{model} norms"] = max(norms)
    bounds = {"losses": 1e-6, "gradients": 1e-6, "norms": 1e-6}
    bounds["weights"] = 1e-6 if case.recipe.optimizer == "sgd" else 5e-5
    far = {what: value for what, value in found.items() if value > bounds[what.split()[-1]]}
    assert not far, f"{case.layouts}: {far} of {found}"
    print(case.layouts, {what: f"{value:.1e}" for what, value in found.items()})
    return found


@pytest.mark.parametrize("actor,critic", PAIRS)
def test_pair_of_layouts_equals_whole_models(workers, folders, references, actor, critic):
    models = {"actor": folders["actor"], "critic": folders["critic"]}
    case = Case({"actor": actor, "critic": critic}, models, recipe=SGD)
    check(run_case(workers, case), references)
