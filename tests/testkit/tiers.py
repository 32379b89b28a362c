"""Which tests run every day, which in CI, which never by themselves; and what may be skipped in CI.

A test's machinery is seen by its fixtures: `programs` starts processes, `workers` or `pools` has ranks, all others run
in this process. Every day runs those, one file of ranks a room, and one quick run.
"""

import os
import re

from testkit.paths import NO_DATA

EVERYDAY, CI, ALL = TIERS = ("everyday", "ci", "all")
IN_PROCESS, RANKS, PROGRAMS = "in_process", "ranks", "programs"
MACHINERY = {"programs": PROGRAMS, "workers": RANKS, "pools": RANKS}  # by fixture, the dearest first
# tests of ranks and programs that run every day: ids begin so
DAILY = (
    "tests/run/checkpoint/test_checkpoint_state.py::test_state_comes_back_bit_for_bit_and_in_other_layouts",
    "tests/fusion/inter/test_inter_stage.py::test_what_a_migration_reports",
    "tests/fusion/intra/test_exact.py::test_a_row_trains_as_whole_models_and_in_any_order_alike[d1t1p4 d2t1p2-changes0",
    "tests/gen/test_tensor_parallel.py::test_degrees_agree_and_each_keeps_its_bits[qwen3",
    "tests/models/test_activations.py::test_gradients_are_those_of_the_whole_model[llama-d1t2p2",
    "tests/parallel/test_weights_between_layouts.py::test_weights_arrive_bit_for_bit",
    "tests/tools/rehearsal/test_fake_cuda.py",
    "tests/run/test_whole_runs.py::test_it_is_the_other_run_bit_for_bit[ppo serial]",
)
EXPECTED_SKIPS = (
    "no CUDA device here",
    "no file system can be mounted",
    "no network of its own can be made",
    "no SLURM here",
    "on one core kernels are compiled one after another",
    r"no browser: none of .* is installed",
    r"triton .* is installed: the tests of each kernel compile with it",
    r"could not import 'flashinfer'",
    "RLHFUSE_TRL_PYTHON names no Python of an environment with TRL",
)


def machinery(fixtures: list[str]) -> str:
    return next((kind for name, kind in MACHINERY.items() if name in fixtures), IN_PROCESS)


def tier_of(nodeid: str, kind: str, markers: set[str]) -> str:
    """The least tier that has the test; `slow` and `ci` are said by its markers."""
    if "slow" in markers:
        return ALL
    if "ci" in markers or (kind != IN_PROCESS and not nodeid.startswith(DAILY)):
        return CI
    return EVERYDAY


def is_expected(reason: str) -> bool:
    """Whether CI may skip a test for that reason."""
    without_data = not os.environ.get("RLHFUSE_TEST_DATA") and NO_DATA in reason
    return without_data or any(re.search(pattern, reason) for pattern in EXPECTED_SKIPS)
