"""Which device a run gets where torch cannot use the GPU; queues for CUDA streams, of which too few can deadlock."""

import os
import warnings

import pytest
import torch
from testkit.tiny import with_models

from rlhfuse.base import cuda_environment
from rlhfuse.base.cuda_environment import set_cuda_environment
from rlhfuse.base.errors import InputError
from rlhfuse.config.settings import RunConfig
from rlhfuse.parallel.device import QUEUES, choose_device, device_kind, give_streams_queues
from rlhfuse.run.preflight import device_of

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by ..."


def run(**trainer) -> RunConfig:
    return with_models(parallel={"generation": "d4t1p1"}, trainer=trainer)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with a driver, loaded, and a torch that finds no device; returns how its start is made to fail."""
    monkeypatch.setattr(cuda_environment, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def fails(error: Exception) -> None:
        def init():
            raise error

        monkeypatch.setattr(torch.cuda, "init", init)

    fails(RuntimeError(TOO_OLD))
    return fails


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_driver_that_is_too_old_is_torchs_reason_and_not_a_run_on_the_cpu(driver, wanted):
    with pytest.raises(InputError, match="too old .found.*TORCH_INDEX.* or set trainer.device=cpu$") as told:
        choose_device(wanted, 0, 1)
    assert "device=auto" not in str(told.value).partition(",")[2] and "\n" not in str(told.value)
    driver(AssertionError("Torch not compiled with CUDA enabled"))
    with pytest.raises(InputError, match="not compiled with CUDA enabled; install"):
        device_kind(wanted)


def test_a_run_and_its_dry_run_are_refused_before_anything_is_read(driver):
    for planned in (False, True):
        with pytest.raises(InputError, match="^trainer.device=auto, but torch .* driver on your system is too old"):
            device_of(run().trainer, planned)
    assert device_of(run(hardware="h100").trainer, planned=True) == "cuda", "a plan for elsewhere"
    assert device_of(run(device="cpu").trainer) == "cpu"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_is_none(driver, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert device_kind("auto") == "cpu"


def test_without_a_driver_auto_is_the_cpu_and_cuda_is_refused_with_torchs_reason(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_environment, "NVIDIA_DRIVER", tmp_path / "none")
    driver(RuntimeError("Found no NVIDIA driver on your system."))
    assert choose_device("auto", 0, 1).torch_device.type == "cpu"
    with pytest.raises(InputError, match="reaches no GPU: Found no NVIDIA driver on your system; "):
        choose_device("cuda", 0, 1)


# hardware queues for streams ------------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """What a program sets before torch is imported; restored afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    set_cuda_environment(os.environ)


def test_every_stream_gets_a_queue_unless_told_otherwise(environment, monkeypatch):
    monkeypatch.delenv(QUEUES)
    with pytest.warns(UserWarning, match=f"{QUEUES}.* set after torch was imported, too late if CUDA has started"):
        give_streams_queues()
    assert os.environ[QUEUES] == "32"
    monkeypatch.setenv(QUEUES, "8")
    with warnings.catch_warnings(action="error"):  # what was set in time is not spoken of
        give_streams_queues()
    assert os.environ[QUEUES] == "8"


@pytest.mark.parametrize("value", ["1", "7", "many"])
def test_too_few_queues_are_refused(environment, monkeypatch, value):
    monkeypatch.setenv(QUEUES, value)
    with pytest.raises(InputError, match=f"{QUEUES}={value} .*unset it"):
        give_streams_queues()
