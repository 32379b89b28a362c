"""What ranks measure in an iteration, and the line of metrics.jsonl that is made of it.

Every rank sends its `IterationStats` to rank 0; metrics have the names that dashboards of RLHF
runs know. Nothing here decides anything.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.base.clock import Clock, Span
from rlhfuse.config.algorithm import AlgorithmConfig
from rlhfuse.costs.fits import Line
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.costs.speculation import StepObservation
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.monitor.pace import PacedClock, PaceStats
from rlhfuse.ppo.advantage import spared_samples
from rlhfuse.ppo.losses import loss_metrics
from rlhfuse.ppo.metrics import balance_metrics, batch_metrics
from rlhfuse.ppo.rollout import RolloutBatch, given
from rlhfuse.run.sampling.tool_caller import ToolStats
from rlhfuse.simulator.lengths import SPARED, TURNS, SampleLengths, read_turns
from rlhfuse.tasks.role import POLICY


@dataclass(frozen=True)
class IterationStats:
    """What one rank measured in an iteration."""

    losses: list[dict[str, dict[str, float]]]  # of each mini-batch, by role: sums over the tokens of this rank
    seconds: dict[str, float]  # of each phase, and of other kinds of work
    program_seconds: float  # in the programs of all mini-batches
    peak_bytes: dict[str, int]  # of each phase of memory
    spans: list[Span]
    tools: ToolStats | None = None
    pace: PaceStats | None = None

    @staticmethod
    def of(
        minibatches: Sequence[MinibatchResult],
        clock: Clock,
        peak_bytes: Mapping[str, int],
        tools: ToolStats | None = None,
    ) -> IterationStats:
        pace = clock.take_pace() if isinstance(clock, PacedClock) else None
        losses = [
            {role: {name: float(value) for name, value in sums.items()} for role, sums in result.stats.items()}
            for result in minibatches
        ]
        seconds = sum(result.report.seconds for result in minibatches)
        return IterationStats(losses, dict(clock.seconds_of), seconds, dict(peak_bytes), clock.spans, tools, pace)


def reward_metrics(report: GenInferReport) -> dict[str, float]:
    """Means of the two parts of a mixed score, failed samples apart; nothing where there is one part only."""
    failed = {rollout.sample_id for rollout in report.rollouts if rollout.failed}
    model = [one.score for one in report.rollouts if one.score is not None and not one.failed]
    function = [score for sample, score in report.function_scores.items() if sample not in failed]
    if not model or not function:
        return {}
    return {"reward/model/mean": sum(model) / len(model), "reward/function/mean": sum(function) / len(function)}


def tool_metrics(report: GenInferReport, leaders: Sequence[ToolStats]) -> dict[str, float]:
    """Turns, calls and seconds of pauses of the samples, and what part of the calls failed; nothing without tools."""
    if not report.turns:
        return {}
    calls, failures = Counter(), Counter()
    for stats in leaders:
        calls.update(stats.calls)
        failures.update(stats.failures)
    samples = [rollout.sample_id for rollout in report.rollouts]
    pauses = [sum(pause for _, pause, _ in report.turns[sample]) for sample in samples]
    of_samples: dict[str, Sequence[float]] = {
        "num_turns": [len(report.turns[sample]) for sample in samples],
        "tool_call_counts": [calls[sample] for sample in samples],
        "agent_loop/tool_calls": pauses,
        "agent_loop/generate_sequences": [report.ended[sample] - paused for sample, paused in zip(samples, pauses)],
    }
    metrics: dict[str, float] = {}
    for name, values in of_samples.items():
        metrics |= {f"{name}/min": min(values), f"{name}/max": max(values), f"{name}/mean": sum(values) / len(values)}
    made, failed = (
        sum(of[sample] for sample in samples) for of in (calls, failures)
    )  # none of groups that were dropped
    return metrics | {"tool/failure_frequency": failed / max(made, 1)}


def failing_tools(leaders: Sequence[ToolStats]) -> dict[str, str]:
    """Tool -> its last error, of those that have failed in every call."""
    answered = {tool for stats in leaders for tool in stats.answered}
    return {tool: last for stats in leaders for tool, last in stats.failed.items() if tool not in answered}


def training_metrics(results: Sequence[MinibatchResult], ranks: Sequence[IterationStats]) -> dict[str, float]:
    """Losses, gradient norms and learning rates of the models that train, means over what was computed."""
    tokens = sum(result.tokens for result in results)
    sums: dict[str, dict[str, float]] = {role: defaultdict(float) for role in results[0].steps}
    for losses in (losses for stats in ranks for losses in stats.losses):
        for role, values in losses.items():
            for name, value in values.items():
                sums[role][name] += value
    metrics: dict[str, float] = {}
    for role in sums:
        metrics |= loss_metrics(role, sums[role], tokens)
    for role in sums:
        metrics[f"{role}/grad_norm"] = sum(r.steps[role].grad_norm for r in results) / len(results)
        metrics[f"{role}/lr"] = results[-1].steps[role].lr
    balances = [balance_metrics([*map(sum, result.lengths)], result.parts_tokens) for result in results]
    for name in balances[0]:
        metrics[name] = sum(balance[name] for balance in balances) / len(balances)
    first = sum(of.get("logprob_abs_diff", 0.0) for stats in ranks for of in stats.losses[0].values())
    metrics["rollout/train_logprob_abs_diff"] = first / max(results[0].tokens, 1)
    return metrics


def rollout_metrics(batch: RolloutBatch, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What was generated and how it was scored; digests tell two runs apart."""
    return batch_metrics(batch, algorithm) | {
        "rollout/digest": batch.digest(),
        "rollout/scores_digest": hashlib.sha256(given(batch.scores).numpy().tobytes()).hexdigest(),
        "lengths/prompt": batch.prompt_lengths.tolist(),
        "lengths/output": batch.response_lengths.tolist(),
    }


def fusion_metrics(report: GenInferReport, threshold: int, instances: int) -> dict[str, Any]:
    """How generation and inference ran."""
    waited = {"timing_s/reward": report.reward_seconds} if report.function_scores else {}
    if report.capture_seconds:
        waited["timing_s/graph_capture"] = report.capture_seconds
    return waited | {
        "timing_s/gen": report.generation_seconds,
        "timing_s/infer": max(report.total_seconds - report.generation_seconds, 0.0),
        "fusion/threshold": threshold,
        "fusion/instances": instances,
        "fusion/destinations": len(report.plan.destinations) if report.plan else 0,
        "fusion/migrated_samples": report.migrated_samples,
        "fusion/migrated_bytes": report.migrated_bytes,
        "fusion/recomputed_samples": report.recomputed_samples,
        "fusion/scored_before_generation_end": report.scored_before_generation_end,
        "fusion/gen_infer_seconds": report.total_seconds,
    }


def speculation_metrics(steps: Sequence[StepObservation], plain: Line | None) -> dict[str, float]:
    """Guesses in the decode steps of all instances, and the seconds that their steps would have taken without.

    Nothing where there were none. `plain`: seconds of a step of (sequences, tokens of context) without guesses.
    """
    guessed = [step for step in steps if step.guesses]
    if not guessed:
        return {}
    metrics: dict[str, float] = {
        "speculation/drafted": sum(step.guesses for step in guessed),
        "speculation/accepted": sum(step.accepted for step in guessed),
        "speculation/tokens_per_step": 1 + sum(s.accepted for s in guessed) / sum(s.batch for s in guessed),
    }
    if plain:
        without = sum(plain(s.batch, s.context_tokens) * (1 + s.accepted / s.batch) for s in guessed)
        metrics["speculation/seconds_saved"] = without - sum(step.seconds for step in guessed)
    return metrics


def speed_metrics(batch: RolloutBatch, seconds: float) -> dict[str, float]:
    """Throughput of a whole iteration that took `seconds`; tokens are those of prompts and responses."""
    return {
        "timing_s/step": seconds,
        "perf/time_per_step": seconds,
        "perf/total_num_tokens": len(batch.tokens),
        "perf/throughput": len(batch.tokens) / seconds,
        "perf/samples_per_second": len(batch) / seconds,
    }


def mfu_metrics(
    flops: IterationFlops, metrics: Mapping[str, float], ranks: int, peak_flops: float | None
) -> dict[str, float]:
    """Model FLOP utilisation: FLOPs over seconds, ranks and a rank's peak; nothing where the peak is not known.

    Models train at once on all ranks, so each counts the seconds of both, and their sum is training's.
    """
    if not peak_flops:
        return {}
    shares = {role: (count, metrics["timing_s/train"]) for role, count in flops.training.items()}
    shares["gen_infer"] = flops.generation + flops.inference, metrics["fusion/gen_infer_seconds"]
    shares["step"] = flops.total, metrics["timing_s/step"]
    used = {name: count / (seconds * ranks * peak_flops) for name, (count, seconds) in shares.items()}
    return {f"perf/mfu/{name}": share for name, share in used.items()} | {f"{POLICY}/mfu": used[POLICY]}


def spared_metrics(
    batch: RolloutBatch, algorithm: AlgorithmConfig, results: Sequence[MinibatchResult]
) -> dict[str, Any]:
    """What training left out, for want of a gradient: parts of all samples and tokens, and which have none.

    Nothing where nothing is left out. The shortest may have been computed all the same, to fill micro-batches.
    """
    if not algorithm.skips:
        return {}
    spared, computed = spared_samples(batch, algorithm), [pair for result in results for pair in result.lengths]
    return {
        "training/zero_gradient/samples": 1 - len(computed) / (algorithm.epochs * len(batch)),
        "training/zero_gradient/tokens": 1 - sum(map(sum, computed)) / (algorithm.epochs * len(batch.tokens)),
        SPARED: [int(sample in spared) for sample in range(len(batch))],
    }


def turn_metrics(batch: RolloutBatch, report: GenInferReport) -> dict[str, Any]:
    """Turns of each sample, for plans; nothing where there are no tools."""
    return {TURNS: [report.turns[sample] for sample in batch.sample_ids.tolist()]} if report.turns else {}


def lengths_of(batch: RolloutBatch, turns: Mapping[int, list[list]] | None = None) -> SampleLengths:
    """Prompt and response lengths in order of sample id; `turns`: by sample id, as a GenInferReport has them."""
    lengths = tuple(batch.prompt_lengths.tolist()), tuple(batch.response_lengths.tolist())
    several = read_turns([turns[sample] for sample in batch.sample_ids.tolist()]) if turns else ()
    return SampleLengths(*lengths, turns=several)


def memory_metrics(ranks: Sequence[IterationStats]) -> dict[str, float]:
    """Peak bytes of each phase, and of the whole iteration, on the fullest rank, in 10^9 bytes."""
    peaks = {phase: max(stats.peak_bytes[phase] for stats in ranks) for phase in ranks[0].peak_bytes}
    metrics = {f"perf/peak_memory_gb/{phase}": peak / 1e9 for phase, peak in peaks.items()}
    return metrics | {"perf/max_memory_allocated_gb": max(metrics.values())}
