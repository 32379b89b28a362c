"""Machines of several kinds: how they are written, what a task on some of them can count on, and what is refused."""

import json
import re
from dataclasses import fields, replace

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.config.device_defaults import is_for_gpus
from rlhfuse.config.machines import Machines
from rlhfuse.config.settings import TrainerConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs.hardware import hardware_by_name, known_hardware, load_hardware, machines_by_name, save_hardware

KNOWN = known_hardware()
WORSE_IF_MORE = {
    *(
        "launch_seconds",
        "backward_launch_seconds",
        "prefill_launch_seconds",
        "half_rate_tokens",
        "decode_layer_seconds",
        "pass_seconds",
        "call_seconds",
    ),
    *("collective_seconds", "cross_collective_seconds"),
    *("recorded_launch_seconds", "short_sum_seconds", "switch_sum_seconds"),
    *("step_waiting", "process_bytes", "communicator_bytes", "channel_bytes", "host_process_bytes"),
}


def test_a_list_is_the_worst_of_its_kinds_on_all_ranks():
    machines = machines_by_name("a100:8, h200:16", ranks=24)
    assert machines.ranks == 24 and machines.text == "a100:8,h200:16"
    whole = machines.whole()
    assert whole.name == "a100:8,h200:16"
    assert whole.memory_bytes == KNOWN["a100"].memory_bytes and whole.flops == KNOWN["a100"].flops
    assert not whole.switch_sums and KNOWN["h200"].switch_sums
    assert hardware_by_name("a100:8,h200:16", "cuda", 24) == whole


def test_each_number_of_a_mixture_is_the_worse_one():
    """Two machines of which the second has twice as much of everything, either way round."""
    numbers = [field.name for field in fields(HardwareSpec) if field.type in ("int", "float")]
    one = replace(KNOWN["h100"], **{name: 8 for name in numbers}, switch_sums=False)
    other = replace(one, name="other", **{name: 16 for name in numbers}, switch_sums=True)
    for kinds in ([(one, 16), (other, 16)], [(other, 16), (one, 16)]):
        mixed = Machines.of(kinds, 32).whole()
        assert {name for name in numbers if getattr(mixed, name) == 16} == WORSE_IF_MORE and not mixed.switch_sums


def test_one_kind_is_that_kind_whether_counted_or_not():
    assert machines_by_name("h100:8,h100:8", ranks=16) == machines_by_name("h100", ranks=16)
    assert machines_by_name("h100:4", ranks=4).whole() == KNOWN["h100"]  # part of a machine, alone
    assert hardware_by_name("cpu:4") == KNOWN["cpu"]


@pytest.mark.parametrize(
    "text, ranks, message",
    [
        ("b200:8,h100:8", 16, "hardware 'b200' is not known; use auto, measured:FILE or one of cpu, a100"),
        ("a100:8,h100", 16, "'h100' names no number of ranks; write h100:8"),
        ("a100:0,h100:8", 8, "'a100:0' names no number of ranks"),
        ("a100:8,h100:8", 24, r"a100:8,h100:8: 8 \+ 8 = 16 ranks != world_size\(24\)"),
        ("a100:4,h100:4", 8, "4 of a100 are no whole machines of 8"),
        ("a100:8,h100:4,h100:8", 20, "12 of h100 are no whole machines"),
        ("cpu:64,h100:8", 72, "on CPUs or on GPUs, not on both"),
        ("a100:8,", 8, "hardware '' is not known"),
    ],
)
def test_what_is_no_list_of_whole_machines_is_refused(text, ranks, message):
    with pytest.raises(InputError, match=message):
        machines_by_name(text, ranks=ranks)


def test_a_list_says_what_device_it_is_for():
    assert is_for_gpus(TrainerConfig(hardware="a100:8,h100:8")) and not is_for_gpus(TrainerConfig(hardware="cpu:4"))
    assert not is_for_gpus(TrainerConfig(device="cpu", hardware="a100:8,h100:8"))


# measured


MEASURED = replace(KNOWN["h100"], flops=4.5e14, source="NVIDIA H100 80GB HBM3, on 2026-11-24", measured=("flops",))


def test_a_measured_machine_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "a, b:8.json"
    save_hardware(file, MEASURED)
    machines = machines_by_name(f"measured:{file}", "cuda", 8)
    assert machines.whole() == MEASURED and machines.ranks == 8 and machines.text == "h100"
    assert is_for_gpus(TrainerConfig(hardware=f"measured:{file}"))


def test_the_measured_machine_of_the_examples_is_an_h100_whose_host_launches_slowly():
    found = hardware_by_name("measured:examples/h100.json", "cuda", 8)
    assert found == hardware_by_name("h100", "cuda", 8) == hardware_by_name("auto", "cuda", 8)
    assert found.name == "h100" and found.launch_seconds > 10 * KNOWN["h200"].launch_seconds
    assert {"flops", "memory_bandwidth", "launch_seconds", "host_bandwidth"} <= {*found.measured}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "profile"}, "is no measured hardware; give a file that scripts/gpu_check.sh --hardware wrote"),
        ({"version": 2}, "version 2 is unknown; this program reads 1"),
        ({"flops": "fast"}, 'flops is "fast"; must be a valid number'),
        ({"flops": 0.0}, "hardware h100: flops is 0.0; a positive number is needed"),
        ({"launch_seconds": -1.0}, "launch_seconds is -1.0; a number that is not negative is needed"),
        ({"tflops": 1.0}, "unknown key 'tflops'; remove it"),
        ({"name": "cpu"}, "name='cpu'"),
        ({"source": ""}, "are not of a GPU that was measured"),
    ],
)
def test_a_file_that_is_no_measured_machine_is_refused(tmp_path, change, message):
    file = tmp_path / "h100.json"
    save_hardware(file, MEASURED)
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_hardware(file)
    assert str(file) in str(error.value)
    with pytest.raises(InputError, match="none.json"):
        hardware_by_name(f"measured:{tmp_path / 'none.json'}")
