"""What ranks save comes back bit for bit, in their layout and in any other."""

from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from testkit.training_pair import Plan, build_pair, write_pair
from testkit.writing import STATE, fill_gradients, writer_of
from torch.optim.adamw import adamw

from rlhfuse.parallel.fragments import Place
from rlhfuse.run.checkpoint.checkpoint import Checkpoint

# state of one rank ----------------------------------------------------------------------------------------------


def build(rank: int, folders: dict, actor: str, critic: str, dtype: str) -> dict:
    """role -> ModelOptimizer of freshly loaded models."""
    pair = build_pair(rank, folders, Plan(actor, critic), dtype=dtype, optim={"weight_decay": 0.1})
    return {role: model.optimizer for role, model in pair.models.items()}


def one_step(rank: int, models: dict, seed: int, lr: float | None = 1e-3, scale: float = 1.0) -> None:
    """An optimizer step on made-up gradients."""
    for model in models.values():
        model.zero_grad()
        fill_gradients(rank, model, seed, scale)
        model.finish_gradients()
        model.step(lr)


def state_of(models: dict) -> dict:
    """role -> parameter -> (place, step, copies of the tensors)."""
    from rlhfuse.parallel.optimizer_state import export_state

    return {role: {one.name: one.to_host() for one in export_state(model)} for role, model in models.items()}


def save(rank: int, out: Path, iteration: int, models: dict, step: bool = True) -> None:
    """Save, and while that is written `step` on: what is written must be the state at the call."""
    from rlhfuse.parallel.optimizer_state import export_state

    writer = writer_of(rank, out)
    writer.start(iteration, STATE, {role: export_state(model) for role, model in models.items()})
    with writer.joint_failure():
        pass
    if step:
        one_step(rank, models, 99)
    writer.finish()
    torch.distributed.barrier()


def load(out: Path, iteration: int, models: dict) -> None:
    from rlhfuse.parallel.optimizer_state import import_state

    reader = Checkpoint.open(out / "checkpoints" / f"iteration-{iteration}").open_reader()
    for role, model in models.items():
        import_state(model, partial(reader.read, role), partial(reader.step, role))


def weights_of(models: dict) -> dict:
    return {f"{r}.{n}": p.detach().clone() for r, m in models.items() for n, p in m.module.named_parameters()}


def save_and_load(rank: int, folders: dict, out: Path, actor: str, critic: str, dtype: str) -> list[str]:
    """Two steps, save, a step more, load into new models, the same step; returns what differs and what is odd."""
    models = build(rank, folders, actor, critic, dtype)
    fresh = state_of(models)
    one_step(rank, models, 0)
    one_step(rank, models, 1)
    state, weights = state_of(models), weights_of(models)
    save(rank, out, 7, models)
    loaded = build(rank, folders, actor, critic, dtype)
    load(out, 7, loaded)
    found = [f"loaded {line}" for line in differing(state, state_of(loaded))]
    found += [f"weights {n}" for n, value in weights_of(loaded).items() if not torch.equal(value, weights[n])]
    for role, rows in state.items():
        before = {n: one.tensors["main"] for n, one in fresh[role].items()}
        found += [f"{n} did not train" for n, one in rows.items() if torch.equal(one.tensors["main"], before[n])]
        found += [f"{n} has step {one.step}" for n, one in rows.items() if one.step != 2 or len(one.tensors) != 3]
    one_step(rank, loaded, 99)  # as `save` did
    found += [f"continued {line}" for line in differing(state_of(models), state_of(loaded))]
    return found


def load_elsewhere(rank: int, folders: dict, out: Path, actor: str, critic: str, dtype: str) -> list[str]:
    """Load checkpoint 7 into another layout, save that as 8; returns what weights and files differ."""
    models = build(rank, folders, actor, critic, dtype)
    load(out, 7, models)
    found = [
        f"weight {role}.{one.name}"
        for role, model in models.items()
        for one in state_of({role: model})[role].values()
        if one.step != 2
    ]
    assert all(sum(1 for _ in model.module.parameters()) > 3 for model in models.values())
    save(rank, out, 8, models)
    before, after = (Checkpoint.open(out / "checkpoints" / f"iteration-{n}").open_reader() for n in (7, 8))
    for role in models:
        for name, shape in after.shapes(role).items():
            for kind in ("main", "exp_avg", "exp_avg_sq"):
                a, b = (reader.read(role, name, kind, Place.whole(shape)) for reader in (before, after))
                found += [] if torch.equal(a, b) else [f"{role}.{kind}.{name}"]
    return found


def differing(a: dict, b: dict) -> list[str]:
    """Fragments of two `state_of` that are not equal to the bit."""
    found = []
    for role in a:
        for name in sorted(a[role].keys() | b[role].keys()):
            one, two = a[role].get(name), b[role].get(name)
            same = one and two and one[:3] == two[:3] and one.tensors.keys() == two.tensors.keys()
            if not same or any(not torch.equal(one.tensors[kind], two.tensors[kind]) for kind in one.tensors):
                found.append(f"{role}.{name}")
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("models"), actor={"tie_word_embeddings": True})


@pytest.mark.parametrize(
    "saved, dtype, elsewhere",
    [
        (("d4t1p1", "d2t1p2"), "float32", ("d1t1p4", "d2t2p1")),
        (("d2t1p2", "d2t1p2:1,3"), "float32", ("d2t1p2:3,1", "d2t1p2")),
        (("d1t2p2", "d2t1p2"), "bfloat16", ("d2t2p1", "d1t1p4")),
    ],
)
def test_state_comes_back_bit_for_bit_and_in_other_layouts(workers, folders, tmp_path, saved, dtype, elsewhere):
    assert workers.run(save_and_load, folders, tmp_path, *saved, dtype) == [[]] * 4
    folder = tmp_path / "checkpoints"
    assert sorted(f.name for f in folder.iterdir()) == ["iteration-7", "latest"]
    checkpoint = Checkpoint.open(folder / "latest")
    assert checkpoint.manifest.state == STATE and checkpoint.metrics_bytes == 7
    files = ["manifest.json", *(f"rank-{rank}.safetensors" for rank in range(4))]
    assert sorted(f.name for f in checkpoint.folder.iterdir()) == files
    assert workers.run(load_elsewhere, folders, tmp_path, *elsewhere, dtype) == [[]] * 4


class FusedAdam:
    """With the layout of Apex's FusedAdam: a group counts the steps. The arithmetic is torch's."""

    def __init__(self, param_groups):
        self.param_groups, self.state = param_groups, defaultdict(dict)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            for weight in weights:
                for kind in ("exp_avg", "exp_avg_sq"):
                    self.state[weight].setdefault(kind, torch.zeros_like(weight))
            adamw(
                weights,
                [weight.grad for weight in weights],
                *([self.state[weight][kind] for weight in weights] for kind in ("exp_avg", "exp_avg_sq")),
                [],
                [torch.tensor(float(group["step"]) - 1) for _ in weights],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{key: group[key] for key in ("lr", "weight_decay", "eps")},
                maximize=False,
                fused=True,
            )


def fuse(models: dict) -> dict:
    """The models with the other Adam, which has no state yet."""
    for model in models.values():
        (zero,) = model.optimizer.chained_optimizers
        zero.optimizer = FusedAdam(zero.optimizer.param_groups)
    return models


def from_one_adam_to_the_other(rank: int, folders: dict, out: Path, layout: str, dtype: str) -> list[str]:
    """Steps under torch's Adam and under a fused one, each loaded by the other; returns what differs."""
    from rlhfuse.parallel.optimizer_state import check_exportable

    found, fused, plain = [], *(build(rank, folders, layout, layout, dtype) for _ in range(2))
    fuse(fused)
    for models in (fused, plain):
        for model in models.values():
            check_exportable(model)
        for seed in range(2):
            one_step(rank, models, seed)
    wanted = state_of(plain)
    found += [f"stepped {line}" for line in differing(wanted, state_of(fused))]
    for number, (models, other) in enumerate(((fused, plain), (plain, fused)), 1):
        save(rank, out, number, models)
        load(out, number, other)
        found += [f"loaded {line}" for line in differing(wanted, state_of(other))]
        one_step(rank, other, 99)  # as `save` did
        found += [f"continued {line}" for line in differing(state_of(models), state_of(other))]
        for one in (models, other):
            load(out, number, one)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_adam_saves_and_loads_what_torchs_does(workers, folders, tmp_path, dtype):
    assert workers.run(from_one_adam_to_the_other, folders, tmp_path, "d2t1p2", dtype) == [[]] * 4


def rest_between_steps(rank: int, folders: dict, out: Path, layout: str, dtype: str) -> list[str]:
    """Steps with and without resting in host memory between them, saved and loaded there; returns what differs."""
    awake, resting = (build(rank, folders, layout, layout, dtype) for _ in range(2))
    found, device_bytes = [], []
    for seed in range(3):
        for model in resting.values():
            model.states.leave()
            model.states.free()
        device_bytes.append(sum(model.states.host_bytes for model in resting.values()))
        found += [f"at rest {seed} {line}" for line in differing(state_of(awake), state_of(resting))]
        if seed == 2:
            save(rank, out, 3, resting, step=False)
        for model in resting.values():
            model.states.come_back()
        for models in (awake, resting):
            one_step(rank, models, seed)
            before = state_of(models)
            one_step(rank, models, seed, lr=None)
            one_step(rank, models, seed, scale=torch.nan)
            found += [f"held still {seed} {line}" for line in differing(before, state_of(models))]
    found += [f"stepped {line}" for line in differing(state_of(awake), state_of(resting))]
    wanted = weights_of(awake)
    found += [f"weights {n}" for n, value in weights_of(resting).items() if not torch.equal(value, wanted[n])]
    for model in resting.values():
        model.states.leave()
        model.states.free()
    load(out, 3, resting)  # brings back
    one_step(rank, resting, 2)
    found += [f"loaded {line}" for line in differing(state_of(awake), state_of(resting))]
    sizes = [device_bytes[0] > 0, device_bytes[1] > device_bytes[0], device_bytes[2] == device_bytes[1]]
    return found + [f"host bytes {device_bytes}"] * (sizes != [dtype == "bfloat16", True, True])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_that_rest_on_the_host_are_those_that_stay(workers, folders, tmp_path, dtype):
    """Moments alone rest where weights are float32: these are their own main weights."""
    assert workers.run(rest_between_steps, folders, tmp_path, "d2t1p2", dtype) == [[]] * 4
