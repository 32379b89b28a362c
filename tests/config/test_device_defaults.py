"""What the device decides: the format of numbers and tokens of a cache block, once, for plan and run alike."""

import pytest
import torch
from testkit.tiny import with_models

from rlhfuse.base.errors import InputError
from rlhfuse.config.device_defaults import is_for_gpus, resolve_device
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.values import AUTO
from rlhfuse.planning.job import Job
from rlhfuse.planning.settle import settle_but_layouts
from rlhfuse.run.preflight import device_of, this_host


def run(**trainer) -> RunConfig:
    return with_models(trainer=trainer)


def chosen(config: RunConfig) -> tuple[str, int]:
    return config.trainer.dtype, config.rollout.block_tokens


@pytest.mark.parametrize(
    "trainer, expected",
    [
        ({}, ("float32", 16)),
        ({"device": "cpu"}, ("float32", 16)),
        ({"hardware": "cpu"}, ("float32", 16)),
        ({"device": "cpu", "hardware": "h100"}, ("float32", 16)),  # a run on CPU, priced as another
        ({"device": "cuda"}, ("bfloat16", 16)),
        ({"device": "cuda", "hardware": "h200"}, ("bfloat16", 16)),
        ({"hardware": "h100"}, ("bfloat16", 16)),  # planned on a machine without a GPU
        ({"device": "cuda", "dtype": "float32"}, ("float32", 16)),
        ({"device": "cpu", "dtype": "bfloat16"}, ("bfloat16", 16)),
    ],
    ids=str,
)
def test_the_device_decides_what_is_left_to_it(trainer, expected):
    resolved = resolve_device(run(**trainer))
    assert chosen(resolved) == expected
    assert resolve_device(resolved) == resolved
    given = run(**trainer).with_(rollout={"block_tokens": 48})
    assert resolve_device(given).rollout.block_tokens == 48


def test_guesses_are_for_cpus():
    """Measured there where nothing is said, and refused where a GPU would have to verify them."""
    for trainer, rows in (({"device": "cpu", "hardware": "h100"}, AUTO), ({"device": "cuda"}, 0)):
        assert resolve_device(run(**trainer)).rollout.draft_rows == rows
        assert resolve_device(run(**trainer).with_(rollout={"draft_rows": 0})).rollout.draft_rows == 0
    given = {"draft_rows": 16}
    assert resolve_device(run(device="cpu").with_(rollout=given)).rollout.draft_rows == 16
    for trainer in ({"device": "cuda"}, {"hardware": "h100"}):
        with pytest.raises(InputError, match="rollout.draft_rows=16: .* use 0"):
            resolve_device(run(**trainer).with_(rollout=given))


@pytest.mark.parametrize("found", [False, True])
def test_a_run_goes_by_the_device_that_there_is_and_a_plan_by_the_hardware_that_it_names(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    on_this_machine = ("cuda", "bfloat16") if found else ("cpu", "float32")
    for config, planned, expected in (
        (run(), False, on_this_machine),
        (run(), True, on_this_machine),
        (run(hardware="h100"), False, on_this_machine),
        (run(hardware="h100"), True, ("cuda", "bfloat16")),
        (run(hardware="h100", device="cpu"), True, ("cpu", "float32")),
    ):
        config = config.with_(fusion={"actor_microbatches": 1})  # nothing is left to a search
        job = Job(config, {}, 4, this_host(config.trainer), device_of(config.trainer, planned))
        trainer = settle_but_layouts(job).config.trainer
        assert (trainer.device, trainer.dtype) == expected
        assert is_for_gpus(trainer) == (trainer.device == "cuda")
