"""Recordings of trainings held against whole models that are trained in one process."""

from __future__ import annotations

import torch

from testkit.training_case import Case, predicted_peaks, scalar_head
from testkit.training_record import Recording
from testkit.whole_model import ReferenceStep, train_whole

# How far a recording may be off whole models in float64. The bounds are float32's own: in one process its gradients of
# these models are 4e-7 to 7e-7 of each tensor's largest away from float64's.
GRADIENTS = 2e-6  # of each tensor's largest; tensor ranks add up in another order
LOSSES = NORMS = 1e-6  # of the largest loss, of the norm
WEIGHTS = {"sgd": 1e-6, "adam": 5e-5}  # absolute, after the last step
LATER = {"sgd": 1e-6, "adam": 5e-6}  # losses and norms of the steps that begin with such weights


class References:
    """Whole models trained in this process, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple, list[ReferenceStep]] = {}

    def steps(self, case: Case, model: str) -> list[ReferenceStep]:
        key = case.folders[model], case.recipe, case.steps, case.samples
        if key not in self._known:
            batches = [case.batch(number) for number in range(case.steps)]
            folder, recipe, *_ = key
            self._known[key] = train_whole(folder, batches, recipe, scalar_head=scalar_head(model))
        return self._known[key]

    def check(self, run: Recording) -> dict[str, float]:
        """Hold a recording against the whole models and the schedule's prediction; returns the measured distances."""
        case, found = run.case, {}
        assert run.peak_live == predicted_peaks(case), case
        for model in case.layouts:
            steps = self.steps(case, model)
            wanted = {
                (model, number, place): float(step.losses[part].sum())
                for number, step in enumerate(steps)
                for place, part in enumerate(case.parts(number))
            }
            mine = {key: loss for key, loss in run.losses.items() if key[0] == model}
            assert mine.keys() == wanted.keys(), "not every micro-batch has one loss"
            largest = max(map(abs, wanted.values()))
            for number, step in enumerate(steps):
                when = "later " if number else ""
                off = max(abs(mine[key] - wanted[key]) for key in wanted if key[1] == number) / largest
                keep_largest(found, f"{model} {when}losses", off)
                keep_largest(found, f"{model} {when}norms", abs(run.norms[number][model] / step.norm - 1))
            found[f"{model} gradients"] = distance(run.gradients[model], steps[0].gradients, relative=True)
            found[f"{model} weights"] = distance(run.weights[model], steps[-1].weights, relative=False)
        print(f"\n{case.layouts} {case.recipe.optimizer}", {what: f"{value:.1e}" for what, value in found.items()})
        name = case.recipe.optimizer
        bounds = {"losses": LOSSES, "norms": NORMS, "gradients": GRADIENTS, "weights": WEIGHTS[name]}
        bounds |= {"later losses": LATER[name], "later norms": LATER[name]}
        far = {what: value for what, value in found.items() if value > bounds[what.split(" ", 1)[1]]}
        assert not far, f"{case.layouts}: {far} of {found}"
        return found


def keep_largest(found: dict[str, float], what: str, value: float) -> None:
    found[what] = max(found.get(what, 0.0), value)


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], relative: bool) -> float:
    """Largest difference over all tensors; `relative`: to each tensor's own largest element."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    worst = 0.0
    for name, tensor in wanted.items():
        difference = float((found[name].double() - tensor.double()).abs().max())
        worst = max(worst, difference / float(tensor.abs().max()) if relative else difference)
    return worst
