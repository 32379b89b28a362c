"""The report of scripts/gpu_check.sh from stand-in figures: what their machine is, and how the planner then prices."""

import json
from dataclasses import asdict, replace

import gpu_check
import pytest
from gpu_checks import report, speed
from gpu_checks.figures import Figure, told
from testkit.four_ranks import SPECS, drafted, run

from rlhfuse.config.spec import HardwareSpec
from rlhfuse.costs import hardware
from rlhfuse.costs.flops import forward_flops
from rlhfuse.costs.forms.roofline import forward_seconds
from rlhfuse.costs.hardware import load_hardware
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport

GPU = {"name": "NVIDIA H100 80GB HBM3", "devices": 8, "capability": 9, "memory_bytes": 85_520_809_984}
ASSUMED = hardware.data_sheets()["h100"].reached()
TRUE = replace(  # the machine that the stand-in figures are of
    ASSUMED,
    flops=5.6e14,
    memory_bandwidth=2.9e12,
    node_link_bandwidth=3.3e11,
    host_bandwidth=5.1e10,
    launch_seconds=140e-6,
    backward_launch_seconds=230e-6,
    prefill_launch_seconds=330e-6,
    half_rate_tokens=290.0,
    decode_share=0.8,
    decode_layer_seconds=21e-6,
    collective_seconds=7e-6,
    recorded_launch_seconds=45e-6,
    short_sum_seconds=13e-6,
    switch_sum_seconds=6e-6,
)


def stand_ins(machine: HardwareSpec) -> list[Figure]:
    """Figures as the checks name them, in the seconds of `machine`."""
    spec, layer, mib = speed.spec_of("8b"), 4, 1 << 20
    made = [
        Figure(f"decode 8b {b} x {c}", 0, ("decode", "8b", b, b * c), speed.step_bytes(spec, b * c))
        for b, c in speed.SHORT
    ]
    made += [Figure("prefill 8b", 0, ("prefill", "8b", 16, 512), flops=forward_flops(spec, [512] * 16, 16))]
    made += [Figure("prefill 8b 1 x 16", 0, ("prefill", "8b", 1, 16))]
    made += [Figure("capture 8b", 0, ("capture", "8b")), Figure("head 8192", 0, ("head", "8b", 8192), flops=2.6e13)]
    for tokens, sequence in ((500, 500), (2048, 512), (8192, 2048)):
        count = tokens // sequence
        flops = forward_flops(replace(spec, layers=layer), [sequence] * count, 0)
        made.append(Figure(f"stage {tokens}", 0, ("training", "8b", layer, tokens, count), 1e10, 3 * flops))
    made.append(Figure("launches 500", 0, ("launches", layer)))
    made.append(Figure("backward launches 500", 0, ("backward launches", layer)))
    made.append(Figure("weights to the device", 0, ("load", 1 << 30), 1 << 30, over="host"))
    for name, price, size in (
        ("all-reduce large", ("all_reduce", 8, 256 * mib), 448 * mib),
        ("all-reduce small", ("all_reduce", 8, 4096), 7168),
        ("send to a neighbour", ("send", 256 * mib), 256 * mib),
        ("recorded sum", ("step_sum", 8, 192, False), 3 * mib),
        ("switch sum", ("step_sum", 8, 192, True), 1.8 * mib),
    ):
        made.append(Figure(name, 0, price, size, over="node_link"))
    times = [(one, report.price_seconds(one, machine)) for one in made]
    lone = {True: 5e-3, False: 0.0}  # that a forward and backward alone take longer than the device
    return [
        replace(one, seconds=time + lone[one.price[0] in report.DEVICE], host_seconds=1e-3, device_seconds=time)
        for one, time in times
    ]


def object_of(figures: list[Figure], environment=GPU) -> dict:
    """What a call that measured them ends with, as read back from its file."""
    checks = [{"name": "all", "ok": True, "seconds": 1.0, "detail": told(*figures, lines=["twice as fast"])}]
    checks += [{"name": "bad", "ok": False, "seconds": 1.0, "detail": "CheckFailed: {}\nmore\nthe end"}]
    made = {"ok": False, "cuda": True, "environment": environment, "not_shown": ["x"], "left_out": ["y"]}
    return json.loads(json.dumps({**made, "checks": checks}))


def close(found: HardwareSpec, wanted: HardwareSpec) -> None:
    numbers = {name: value for name, value in asdict(wanted).items() if isinstance(value, float)}
    assert {name: getattr(found, name) for name in numbers} == pytest.approx(numbers, rel=1e-6)


def test_the_machine_that_figures_were_made_of_is_found_and_written(tmp_path):
    file = tmp_path / "gpu.json"
    lines = gpu_check.lines_of(object_of(stand_ins(TRUE)), file)
    found = load_hardware(file)
    close(found, TRUE)
    assert found.source.startswith("NVIDIA H100 80GB HBM3, on 20") and len(found.measured) == len(report.FOLLOWS)
    assert lines[-1] == f"{file} is written: plan and train with trainer.hardware=measured:{file}"
    assert "twice as fast" in lines
    assert "failed: bad: CheckFailed: {} ... the end" in lines and "left out: y; --done goes on with them" in lines
    assert "flops: 5.6e+14 here, assumed 4.945e+14" in lines
    row = next(line.split() for line in lines if line.startswith("decode 8b 192 x 1000"))
    # bytes over 3.35e12 a second, their share of the measured seconds, and the planner's prices before and after
    limit = speed.step_bytes(speed.spec_of("8b"), 192000) / 3.35e12
    seconds, assumed = (report.cost_of(m, "8b").decode_step_seconds(192, 192000) for m in (TRUE, ASSUMED))
    measured, at_best, before = map(report.readable, (seconds, limit, assumed))
    assert " ".join(row[5:]) == f"{measured} {at_best} {limit / seconds:.0%} 1 ms {measured} {before} {measured}"


def test_the_planner_prices_with_what_was_measured(tmp_path):
    """A machine of half the rates and twice the floors: every price is twice what is assumed of the data sheet."""
    rates = ("flops", "memory_bandwidth", "node_link_bandwidth", "host_bandwidth")
    floors = [constant for constant, _ in report.FOLLOWS if constant not in (*rates, "decode_share")]
    half = {name: getattr(ASSUMED, name) / 2 for name in rates} | {name: 2 * getattr(ASSUMED, name) for name in floors}
    file = tmp_path / "gpu.json"
    gpu_check.lines_of(object_of(stand_ins(replace(ASSUMED, **half))), file)
    layouts = dict(parallel__actor_train="d1t1p4", parallel__critic_train="d1t1p4", parallel__generation="d4t1p1")
    runs = [run(trainer__device="cuda", trainer__hardware=name, **layouts) for name in ("h800", f"measured:{file}")]
    assumed, measured = drafts = [drafted(made, SPECS, 4) for made in runs]
    for task, cost in assumed.analytic.items():
        slower = measured.analytic[task]
        half, whole = (forward_seconds(made.roofline, 4096, 8, 4096) for made in (slower, cost))
        assert half == pytest.approx(2 * whole, rel=1e-6)
        assert slower.decode_step_seconds(8, 800) == pytest.approx(2 * cost.decode_step_seconds(8, 800), rel=1e-6)
    before, told = (PlanReport.of(make_plan(draft)).render() for draft in drafts)
    assert f"hardware: measured:{file} (NVIDIA H100 80GB HBM3, on 20" in " ".join(told.split())
    assert "nothing was measured here" in before and "nothing was measured" not in told
