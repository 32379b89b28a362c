"""One iteration on paper: generation and inference, serial or fused, then training.

Fused, with n = 4 instances and R_t reached at time T (paper Figure 5); `=` generate, `m` migrate, `w` weights in,
`s` score:

    0 ============T m ==================w s
    1 =========   T m w sssssss       ss          the tail's samples are scored as they end
    2 =====       T m w ssssss       s
    3 ===========.T m w sssssss

Every instance stops at its first step boundary after T and they agree there; freed ones load the weights and score.
Work costs what it costs beside what the others do: until T they decode, the tail decodes beside workers that score
while any of them does. Serial waits for the last sample and then scores on all instances, dealt by tokens.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from rlhfuse.costs.analytic import NEIGHBOURS, CostModel
from rlhfuse.decisions.migration import FusionLimits, MoveCost, check_threshold
from rlhfuse.decisions.packing import deal, scoring_packs
from rlhfuse.simulator.instances import InstanceLimits, InstanceRun, start_instances
from rlhfuse.simulator.lengths import SampleLengths
from rlhfuse.simulator.scoring_queue import ScoringDesk, first_pack
from rlhfuse.simulator.spans import GenInferTimeline, Span, tile
from rlhfuse.simulator.tail import Meeting, Tail


def simulate_gen_infer(
    lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits, threshold: int
) -> GenInferTimeline:
    """Simulate one batch that migrates when `threshold` samples remain; 0, a single instance or no tail: serial.

    Raises InputError for a threshold or lengths beyond the limits.
    """
    return BatchSimulation(lengths, instances, costs, limits).timeline(threshold)


class BatchSimulation:
    """One batch on so many instances, for any number of thresholds.

    What is the same for all of them is simulated once: generation without a migration, and generation up to the
    last event before a trigger, which goes on from there as long as triggers come later and later.
    """

    def __init__(self, lengths: SampleLengths, instances: int, costs: CostModel, limits: InstanceLimits) -> None:
        """Raises InputError for lengths beyond the limits."""
        self.lengths, self.instances, self.limits = lengths, instances, limits
        self.tokens = [limits.scored_tokens(p, o) for p, o in zip(lengths.prompt, lengths.output)]
        self.fusion_limits = fusion_limits(costs, limits)
        self.beside = {neighbour: costs.beside(neighbour) for neighbour in NEIGHBOURS}
        self._begin = self.beside["decoding" if instances > 1 else "idle"]
        self._live, self._reached = self._fresh(), 0.0
        self._whole = self._fresh()
        for run in self._whole:
            run.run()
        self._ends = sorted(seconds for run in self._whole for seconds, _ in run.finished)

    def timeline(self, threshold: int) -> GenInferTimeline:
        """Generation and inference with this R_t; see `simulate_gen_infer`."""
        check_threshold(threshold, len(self.lengths))
        if threshold and self.instances > 1:
            moment = self.moment(threshold)
            tail = Tail(self._runs_at(moment), self.limits, self._begin, self.fusion_limits)
            meeting = tail.meet(moment, threshold)
            if meeting:
                return _Fused(self, tail, meeting).simulate()
        return self._serial()

    def moment(self, remaining: int) -> float:
        """Seconds after which at most `remaining` samples are unfinished; all of them: as soon as a step has ended."""
        return self._ends[-remaining - 1] if remaining < len(self._ends) else math.ulp(0.0)

    def _fresh(self) -> list[InstanceRun]:
        return start_instances(self.lengths, self.instances, self._begin, self.limits)

    def _runs_at(self, seconds: float) -> list[InstanceRun]:
        """Copies of all instances, not later than `seconds`; running them on to any later time is exact."""
        if seconds < self._reached:
            self._live = self._fresh()
        self._reached = seconds
        for run in self._live:
            run.run_events(seconds)
        return [run.copy() for run in self._live]

    def _serial(self) -> GenInferTimeline:
        spans = [Span(instance, "generate", 0.0, run.clock) for instance, run in enumerate(self._whole)]
        generation = self._ends[-1]
        costs = self.beside["scoring" if self.instances > 1 else "idle"]
        met = generation + costs.meeting_seconds()
        spans += [Span(instance, "meet", generation, met) for instance in range(self.instances)]
        begin = met + costs.release_seconds()
        for instance, share in enumerate(deal(self.tokens, self.instances)):
            own = [self.tokens[i] for i in share]
            clock = begin
            for number, pack in enumerate(scoring_packs(own, 1, self.limits.score_tokens)):
                start, seconds = clock, costs.score_seconds(sum(own[i] for i in pack), len(pack))
                clock = start + seconds
                if number == 0:
                    models = self.limits.scoring_models
                    start, clock = first_pack(begin, begin, costs.swap_in_seconds(), seconds, models)
                    spans.append(Span(instance, "swap_in", begin, start))
                spans.append(Span(instance, "score", start, clock))
        total = max(span.end for span in spans)
        return GenInferTimeline(
            spans=tile(spans, self.instances, total),
            total_seconds=total,
            generation_seconds=generation,
            migration_seconds=0.0,
            trigger_seconds=None,
            plan=None,
            migrated_bytes=0.0,
            scored_before_generation_end=0,
        )


class _Fused:
    """From the meeting on: goes from event to event of the tail and of the desk."""

    def __init__(self, batch: BatchSimulation, tail: Tail, meeting: Meeting) -> None:
        self.batch, self.tail, self.meeting = batch, tail, meeting
        known = tail.take_known()
        self.desk = ScoringDesk([batch.tokens[i] for i in known], batch.instances, batch.limits)
        self.remaining = len(batch.lengths) - len(known)
        self.pace = batch.beside["decoding"]
        self.release = self.pace.release_seconds()
        self.spans: list[Span] = []
        for instance, stopped in meeting.stopped.items():
            self.spans.append(Span(instance, "generate", 0.0, stopped))
            met_since = max(stopped, meeting.seconds - self.pace.meeting_seconds())  # until then it waits
            self.spans.append(Span(instance, "meet", met_since, meeting.seconds))
            self.spans.append(Span(instance, "migrate", meeting.seconds, meeting.ends[instance]))
            if instance not in tail.decoding:  # freed, or a destination without a sample
                self.desk.join(meeting.ends[instance] + self.release, instance, instance in meeting.plan.freed)
        tail.look_ahead()

    def simulate(self) -> GenInferTimeline:
        generation = now = self.meeting.seconds
        while now < math.inf:
            self.desk.draw(now, self.batch.beside["decoding" if self.remaining else "scoring"])
            self._set_pace(now)
            now = min(self.desk.next_seconds, self.tail.next_end)
            while self.tail.next_end <= now < math.inf:
                generation = self._take_sample()
        total = max(generation, *(span.end for span in self.desk.spans))
        return GenInferTimeline(
            spans=tile([*self.spans, *self.desk.spans], self.batch.instances, total),
            total_seconds=total,
            generation_seconds=generation,
            migration_seconds=self.meeting.migration_seconds,
            trigger_seconds=self.meeting.seconds,
            plan=self.meeting.plan,
            migrated_bytes=self.meeting.moved_bytes,
            scored_before_generation_end=self.desk.done_before(generation),
        )

    def _take_sample(self) -> float:
        """The next sample of the tail ends; its instance joins the workers if it was the last one there."""
        seconds, sample, emptied = self.tail.take_next()
        self.desk.stream(self.batch.tokens[sample])
        self.remaining -= 1
        if emptied is not None:
            self.spans.append(Span(emptied, "generate", self.meeting.ends[emptied], seconds))
            self.desk.join(seconds + self.release, emptied, loads=False)
        return seconds

    def _set_pace(self, now: float) -> None:
        """What the tail decodes beside: workers that score, others of the tail, or nobody."""
        name = "scoring" if self.desk.scores else "decoding" if len(self.tail.decoding) > 1 else "idle"
        pace = self.batch.beside[name]
        if pace is not self.pace and self.tail.decoding:
            self.pace = pace
            self.tail.change_pace(now, pace)


def move_cost(costs: CostModel, limits: InstanceLimits) -> MoveCost:
    """The two straight lines that decide how a sample moves, read off a cost model.

    The lines go through one block and one longest sample, so they are exact for linear costs.
    """
    one, far = limits.block_tokens, max(limits.longest, limits.block_tokens + 1)
    prefill = [costs.prefill_seconds(tokens, 1) for tokens in (one, far)]
    slope = (prefill[1] - prefill[0]) / (far - one)
    volumes = [tokens * limits.kv_bytes_per_token for tokens in (one, far)]
    transfer = [costs.migration_seconds(volume) for volume in volumes]
    per_byte = (transfer[1] - transfer[0]) / (volumes[1] - volumes[0])
    return MoveCost(
        kv_bytes_per_token=limits.kv_bytes_per_token,
        transfer_latency_seconds=transfer[0] - per_byte * volumes[0],
        transfer_seconds_per_byte=per_byte,
        prefill_seconds_per_token=slope,
        prefill_latency_seconds=prefill[0] - slope * one,
    )


def fusion_limits(costs: CostModel, limits: InstanceLimits) -> FusionLimits:
    """What a migration plan depends on, from a cost model and what an instance holds."""
    return FusionLimits(
        bs_max=limits.bs_max,
        sample_kv_bytes=limits.sample_kv_bytes,
        capacity_kv_bytes=limits.kv_capacity_bytes,
        block_tokens=limits.block_tokens,
        move_cost=move_cost(costs, limits),
        score_tokens=limits.score_tokens,
    )


@dataclass(frozen=True)
class IterationSeconds:
    """Predicted seconds of one iteration's parts, serial and fused; the weights move one model after the other.

    `generation_*`, part of `gen_infer_*`: until the last sample is generated; None where only the whole is known.
    """

    weight_moves: float  # into the layouts of generation and inference, fused or not
    gen_infer_serial: float
    gen_infer_fused: float
    training_serial: float
    training_fused: float
    generation_serial: float | None = None
    generation_fused: float | None = None

    @property
    def serial(self) -> float:
        return self.weight_moves + self.gen_infer_serial + self.training_serial

    @property
    def fused(self) -> float:
        return self.weight_moves + self.gen_infer_fused + self.training_fused

    @property
    def speedup(self) -> float:
        return self.serial / self.fused

    def to_dict(self) -> dict:
        return asdict(self)


def simulate_iteration(
    lengths: SampleLengths,
    instances: int,
    costs: CostModel,
    limits: InstanceLimits,
    threshold: int,
    minibatch_seconds: tuple[float, float],
    minibatches: int,
    weight_moves: float,
) -> IterationSeconds:
    """A whole iteration.

    `minibatch_seconds` are a mini-batch's training makespans (serial, fused), `weight_moves` the seconds of all moves
    between layouts.
    """
    batch = BatchSimulation(lengths, instances, costs, limits)
    serial, fused = batch.timeline(0), batch.timeline(threshold)
    return IterationSeconds(
        weight_moves,
        serial.total_seconds,
        fused.total_seconds,
        minibatch_seconds[0] * minibatches,
        minibatch_seconds[1] * minibatches,
        serial.generation_seconds,
        fused.generation_seconds,
    )
