"""Why a plan is as it is, in words: the lines that stand beside its numbers.

Computes nothing of the plan; what it explains is handed in.
"""

from __future__ import annotations

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import HardwareSpec
from rlhfuse.planning.memory import PhaseMemory, readable_bytes
from rlhfuse.planning.memory_check import REMEDIES, needed_bytes
from rlhfuse.simulator.instances import InstanceLimits
from rlhfuse.simulator.lengths import SampleLengths


def lengths_reason(config: RunConfig, lengths: SampleLengths | None, draws: int) -> str:
    """Which lengths the times are for; of known ones, so many batches are drawn and averaged."""
    if lengths is None:
        return (
            f"no lengths are known yet: every sample counts {config.data.max_prompt_tokens} + "
            f"{config.rollout.max_response_tokens} tokens, so times are upper bounds and show no tail to hide"
        )
    marks, limit = lengths.percentiles(), config.rollout.max_response_tokens
    cut = sum(output > limit for output in lengths.output)
    return (
        f"times are means of {draws} batches drawn from {len(lengths)} past samples: output p50 {marks['p50']}, p99.9 "
        f"{marks['p999']}, max {marks['max']}; {cut} of them are cut to this run's {limit}"
    )


def costs_reason(config: RunConfig, hardware: HardwareSpec) -> str:
    """Where the times are from that nothing here has measured."""
    unsure = config.trainer.hardware == "auto" and hardware.name != "cpu"
    assumed = " (trainer.hardware=auto: assumed)" if unsure else ""
    return (
        f"times are a roofline with the rates of a {hardware.name}{assumed}; nothing was measured here: set "
        "fusion.profile to a past run's costs.json, or to what tools/profile_costs.py measures"
    )


def threshold_hints(config: RunConfig, chosen: int | None, lengths: SampleLengths | None) -> tuple[str, ...]:
    """What R_t would need to be known, or what the run does with lengths of its own."""
    if chosen is None:
        return (
            "until then iterations are serial; with --lengths FILE[:COLUMN] of past responses tools/plan.py predicts "
            "it, and with fusion.threshold_file (tools/calibrate_threshold.py) the run begins with it",
        )
    if lengths is not None and config.threshold() is None and not config.fusion.threshold_file and chosen:
        return (
            "a prediction: the run chooses from its own lengths and costs, from its second iteration on; to begin with "
            "a known one set fusion.threshold_file (tools/calibrate_threshold.py)",
        )
    return ()


def limits_reason(config: RunConfig, limits: InstanceLimits) -> str:
    """What bounds the samples that go on decoding on one instance."""
    source = "fusion.bs_max" if config.fusion.bs_max else "decode steps within 10% of batch 1"
    return (
        f"BS_max = {limits.bs_max} ({source}); KV of one sample at most M = "
        f"{readable_bytes(limits.sample_kv_bytes)}, of an instance C = {readable_bytes(limits.kv_capacity_bytes)}"
    )


def memory_reason(memory: tuple[PhaseMemory, ...], hardware: HardwareSpec, limit: float) -> str:
    """The fullest phase beside the `limit`, in bytes per rank; and what to change where it does not fit."""
    needs = {phase.phase: needed_bytes(phase, hardware) for phase in memory}
    fullest = max(needs, key=needs.__getitem__)
    fits = "fits in" if needs[fullest] <= limit else "DOES NOT FIT in"
    with_host = ", host copies and the process itself included," if hardware.name == "cpu" else ""
    remedy = "" if needs[fullest] <= limit else f": {REMEDIES[fullest]}"
    return (
        f"the fullest phase, {fullest}, needs {readable_bytes(needs[fullest])} per rank{with_host} and {fits} "
        f"{readable_bytes(limit)}{remedy}"
    )
