"""R_t while training runs: from the plan at first, then from what the run itself shows.

After each iteration rank 0 fits the costs of decoding, prefill, scoring, migration and loading to the recent
observations, simulates every R_t over the recent lengths, and tells the others (paper section 4.2). A fixed
`fusion.threshold` is kept; without inter-stage fusion R_t is 0.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Sequence

import torch
import torch.distributed as dist

from rlhfuse.config import RunConfig
from rlhfuse.errors import InputError
from rlhfuse.fusion.inter_stage import FusionLimits, GenInferReport
from rlhfuse.parallel.collect import all_gather_bytes
from rlhfuse.parallel.device import Device
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.simulator.cost import CostModel
from rlhfuse.simulator.generation import InstanceLimits
from rlhfuse.simulator.iteration import GenInferTimeline, move_cost, simulate_gen_infer
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.measured import (
    BytesObservation,
    DecodeObservation,
    MeasuredCost,
    TokensObservation,
    save_measured_cost,
)
from rlhfuse.simulator.plan import Plan
from rlhfuse.simulator.planner import instance_limits, median_context
from rlhfuse.simulator.threshold import Threshold, sweep_threshold
from rlhfuse.spec import ModelSpec

RECENT_ITERATIONS = 4
WORTH_MOVING = 0.02  # the curve over R_t is flat around its minimum: smaller gains are noise
PROBE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)  # sizes of the transfers measured at start
PROBE_TRIPS = 8  # there and back; the first one connects


def steady(found: Threshold, current: tuple[int, ...]) -> tuple[int, ...]:
    """The triggers in force where the best are predicted to gain less than WORTH_MOVING over them, else the best."""
    for point in found.sweep:
        if (point.threshold,) == (current or (0,)) and point.fused_seconds <= found.fused_seconds * (1 + WORTH_MOVING):
            return current
    return found.triggers


def _spoken(triggers: Sequence[int]) -> str:
    return ", then ".join(map(str, triggers)) or "0"


def probe_transfer(device: Device) -> list[list[float]]:
    """(bytes, seconds one way) of a few sizes between rank 0 and the last rank; a collective, known to all.

    Of several round trips the fastest counts: what a transfer costs, not how long a busy peer keeps it waiting.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rows: list[list[float]] = []
    if world > 1 and rank in (0, world - 1):
        peer = world - 1 - rank
        first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
        for size in PROBE_BYTES:
            buffer = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
            trips = []
            for _ in range(PROBE_TRIPS):
                start = time.perf_counter()
                first(buffer, peer)
                second(buffer, peer)
                device.synchronize()
                trips.append((time.perf_counter() - start) / 2)
            rows.append([size, min(trips)])
    return json.loads(all_gather_bytes(json.dumps(rows if rank == 0 else []).encode())[0])


class ThresholdControl:
    """Holds the R_t in force and what it was chosen from. All ranks hold the same values."""

    def __init__(
        self, config: RunConfig, plan: Plan, specs: dict[str, ModelSpec], analytic: CostModel, device: Device
    ) -> None:
        """`analytic` prices decoding and moving until the first iteration has been measured."""
        self._config = config
        self._spec = specs["actor"]
        self._instances = plan.batch.instances
        self._adapts = config.fusion.inter_stage and config.threshold() is None and self._instances > 1
        self.triggers: tuple[int, ...] = (plan.threshold_samples,) if plan.threshold_samples else ()
        self._transfers = probe_transfer(device) if config.fusion.inter_stage and self._instances > 1 else []
        self._observed: deque[dict] = deque(maxlen=RECENT_ITERATIONS)
        self._lengths: deque[SampleLengths] = deque(maxlen=RECENT_ITERATIONS)
        self._costs: CostModel = analytic
        self.limits = self._fusion_limits(self._instance_limits())

    def observe(self, iteration: int, report: GenInferReport, batch: RolloutBatch) -> str:
        """Take an iteration in; a collective. Returns a line for the log when R_t is set or moves, else ''."""
        self._observed.append(report.observations)
        self._lengths.append(
            SampleLengths(tuple(batch.prompt_lengths.tolist()), tuple(batch.response_lengths.tolist()))
        )
        self._costs = self._fit()
        limits = self._instance_limits()
        decided = b""
        if self._adapts and dist.get_rank() == 0:
            found = sweep_threshold(list(self._lengths), self._instances, self._costs, limits)
            decided = json.dumps([steady(found, self.triggers), found.explain()]).encode()
        decided = all_gather_bytes(decided)[0]
        self.limits = self._fusion_limits(limits)
        if not self._adapts:
            return ""
        before, (triggers, reason) = self.triggers, json.loads(decided)
        self.triggers = tuple(triggers)
        if iteration == 0 or before != self.triggers:
            return f"R_t {_spoken(before)} -> {_spoken(self.triggers)}: {reason}"
        return ""

    def simulate(self, triggers: Sequence[int]) -> GenInferTimeline:
        """The simulator's timeline of the batch observed last, at the measured costs."""
        return simulate_gen_infer(
            self._lengths[-1], self._instances, self._costs, self._instance_limits(), triggers
        )

    def save_costs(self, path: Path) -> None:
        """Write the fitted costs, which `fusion.profile` of a later run or plan reads."""
        assert isinstance(self._costs, MeasuredCost), "an iteration must have been observed"
        save_measured_cost(self._costs, path)

    def state(self) -> dict:
        """What the next R_t depends on, as JSON values; after the first iteration."""
        return {
            "triggers": list(self.triggers),
            "observations": list(self._observed),
            "lengths": [{"prompt": list(one.prompt), "output": list(one.output)} for one in self._lengths],
            "costs": self._costs.to_dict(),
        }

    def restore(self, state: dict, where: str, lengths_alone: bool = False) -> None:
        """Inverse of `state`; a fixed or switched-off R_t stays as configured. Raises InputError naming `where`.

        With `lengths_alone` costs and R_t, which are of another layout, are left out.
        """
        try:
            self._lengths.extend(SampleLengths(tuple(one["prompt"]), tuple(one["output"])) for one in state["lengths"])
            if lengths_alone:
                return
            self._observed.extend(state["observations"])
            self._costs = MeasuredCost.from_dict(state["costs"], where)
            if self._adapts:
                self.triggers = tuple(state["triggers"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{where}: the threshold state lacks {error}; resume from another checkpoint") from None
        self.limits = self._fusion_limits(self._instance_limits())

    def _fit(self) -> MeasuredCost:
        def rows(kind: str) -> list[list[float]]:
            return [row for observed in self._observed for row in observed[kind]]

        return MeasuredCost.fit(
            decode=[DecodeObservation(int(b), int(c), s) for b, c, s in rows("decode")],
            prefill=[TokensObservation(int(t), int(n), s) for t, n, s in rows("prefill")],
            score=[TokensObservation(int(t), int(n), s) for t, n, s in rows("score")],
            migration=[BytesObservation(int(b), s) for b, s in self._transfers] or [BytesObservation(0, 0.0)],
            swap_in=[row[0] for row in rows("load")],
        )

    def _instance_limits(self) -> InstanceLimits:
        context = median_context(self._lengths[-1]) if self._lengths else float(self._config.data.max_prompt_tokens)
        return instance_limits(self._config, self._spec, self._instances, self._costs, context)

    def _fusion_limits(self, limits: InstanceLimits) -> FusionLimits:
        return FusionLimits(
            bs_max=limits.bs_max,
            sample_kv_bytes=limits.sample_kv_bytes,
            capacity_kv_bytes=limits.kv_capacity_bytes,
            block_tokens=limits.block_tokens,
            move_cost=move_cost(self._costs, limits),
            score_tokens=limits.score_tokens,
        )
