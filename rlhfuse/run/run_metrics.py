"""One iteration's line of metrics.jsonl, from the batch, the report of generation and inference, and every rank's sums.

Names are those that dashboards of RLHF runs know. Computes nothing that training depends on.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rlhfuse.config.settings import AlgorithmConfig
from rlhfuse.costs.flops import IterationFlops
from rlhfuse.fusion.inter.report import GenInferReport
from rlhfuse.fusion.intra.training_step import MinibatchResult
from rlhfuse.ppo.losses import actor_metrics, critic_metrics
from rlhfuse.ppo.metrics import balance_metrics, batch_metrics
from rlhfuse.ppo.rollout import RolloutBatch
from rlhfuse.simulator.lengths import SampleLengths


def reward_metrics(report: GenInferReport) -> dict[str, float]:
    """Means of the two parts of a mixed score; nothing where there is one part only."""
    model = [rollout.score for rollout in report.rollouts if rollout.score is not None]
    function = report.function_scores.values()
    if not model or not function:
        return {}
    return {"reward/model/mean": sum(model) / len(model), "reward/function/mean": sum(function) / len(function)}


def training_metrics(results: Sequence[MinibatchResult], everyone: Sequence[Mapping]) -> dict[str, float]:
    """Losses, gradient norms and learning rates of the models that train, means over the iteration.

    `everyone` has each rank's "stats": per mini-batch and role the sums over its tokens.
    """
    tokens = sum(result.tokens for result in results)
    sums: dict[str, dict[str, float]] = {role: defaultdict(float) for role in results[0].steps}
    for one in everyone:
        for stats in one["stats"]:
            for role, values in stats.items():
                for name, value in values.items():
                    sums[role][name] += value
    metrics = actor_metrics(sums["actor"], tokens)
    if "critic" in sums:
        metrics |= critic_metrics(sums["critic"], tokens)
    for role in sums:
        metrics[f"{role}/grad_norm"] = sum(r.steps[role].grad_norm for r in results) / len(results)
        metrics[f"{role}/lr"] = results[-1].steps[role].lr
    cuts = [balance_metrics(result.sample_tokens, result.parts_tokens) for result in results]
    for name in cuts[0]:
        metrics[name] = sum(cut[name] for cut in cuts) / len(cuts)
    first = sum(one["stats"][0].get("actor", {}).get("logprob_abs_diff", 0.0) for one in everyone)
    metrics["rollout/train_logprob_abs_diff"] = first / results[0].tokens
    return metrics


def rollout_metrics(batch: RolloutBatch, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """What was generated and how it was scored; digests tell two runs apart."""
    return batch_metrics(batch, algorithm) | {
        "critic/score/std": float(batch.scores.double().std(correction=0)),
        "rollout/digest": batch.digest(),
        "rollout/scores_digest": hashlib.sha256(batch.scores.numpy().tobytes()).hexdigest(),
        "lengths/prompt": batch.prompt_lengths.tolist(),
        "lengths/output": batch.response_lengths.tolist(),
    }


def fusion_metrics(report: GenInferReport, threshold: int, instances: int) -> dict[str, Any]:
    """How generation and inference ran."""
    return {
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


def speed_metrics(batch: RolloutBatch, seconds: float) -> dict[str, float]:
    """Of a whole iteration that took `seconds`; tokens are those of prompts and responses."""
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
    return {f"perf/mfu/{name}": share for name, share in used.items()} | {"actor/mfu": used["actor"]}


def lengths_of(batch: RolloutBatch) -> SampleLengths:
    """Prompt and response lengths in order of sample id."""
    return SampleLengths(tuple(batch.prompt_lengths.tolist()), tuple(batch.response_lengths.tolist()))


def memory_metrics(everyone: list[dict]) -> dict[str, float]:
    """Peak bytes of each phase, and of the whole iteration, on the fullest rank, in 10^9 bytes."""
    peaks = [one["peaks"] for one in everyone]
    metrics = {f"perf/peak_memory_gb/{phase}": max(one[phase] for one in peaks) / 1e9 for phase in peaks[0]}
    return metrics | {"perf/max_memory_allocated_gb": max(metrics.values())}
