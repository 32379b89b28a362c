"""Which metrics are drawn over the iterations, in what unit, and why a run may have none of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfuse.monitor.phase_times import number

NO_CRITIC = "no critic was trained"
NO_GUESSES = "no tokens were guessed"
GIB_PER_GB = 1e9 / 2**30


@dataclass(frozen=True)
class Curve:
    """One picture: `metrics` with what each is called in it, drawn times `factor`; `missing`: why there may be none."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    missing: str = "metrics.jsonl has no such key"
    factor: float = 1.0

    def values(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
        """By name, of those metrics that some row has; None where one has not, or no finite number."""
        found = {name: [number(row.get(metric)) for row in rows] for metric, name in self.metrics.items()}
        return {
            name: [value if value is None else self.factor * value for value in values]
            for name, values in found.items()
            if any(value is not None for value in values)
        }

    def why_not(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Why it has no value in these rows."""
        kept = any(metric in row for row in rows for metric in self.metrics)
        return "never a finite number" if kept else self.missing


CURVES = (
    Curve("score", "score", {"critic/score/mean": "mean", "critic/score/max": "best", "critic/score/min": "worst"}),
    Curve("KL to the reference", "nats per token", {"actor/ref_kl": "KL"}, "there is no reference model"),
    Curve("response length", "tokens", {"response_length/mean": "mean", "response_length/max": "longest"}),
    Curve("entropy", "nats per token", {"actor/entropy": "entropy"}),
    Curve("policy loss", "loss per token", {"actor/pg_loss": "policy loss"}),
    Curve("clipped tokens", "% of tokens", {"actor/pg_clipfrac": "actor", "critic/vf_clipfrac": "critic"}, factor=100),
    Curve("value loss", "loss per token", {"critic/vf_loss": "value loss"}, NO_CRITIC),
    Curve("explained variance of values", "share, 1 is all", {"critic/vf_explained_var": "values"}, NO_CRITIC),
    Curve("gradient norm", "norm before clipping", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}),
    Curve("learning rate", "per step", {"actor/lr": "actor", "critic/lr": "critic"}),
    Curve(
        "log-probability, generation against training",
        "nats per token, mean |difference|",
        {"rollout/train_logprob_abs_diff": "difference"},
    ),
    Curve("speed", "samples per second", {"perf/samples_per_second": "speed"}),
    Curve("guessed tokens that were right", "% of guesses", {"speculation/accepted_share": "right"}, NO_GUESSES, 100),
    Curve("tokens of a sample in a step with guesses", "tokens", {"speculation/tokens_per_step": "tokens"}, NO_GUESSES),
    Curve("time saved by guesses", "seconds", {"speculation/seconds_saved": "saved"}, "no guesses with known costs"),
    Curve(
        "use of the hardware (MFU)",
        "% of peak FLOP/s",
        {
            "perf/mfu/actor": "actor's training",
            "perf/mfu/critic": "critic's training",
            "perf/mfu/gen_infer": "generation, inference",
        },
        "this machine's peak is not known: trainer.peak_tflops",
        100,
    ),
    Curve(
        "peak memory of the fullest rank",
        "GiB",
        {f"perf/peak_memory_gb/{phase}": phase for phase in ("generation", "inference", "training")},
        factor=GIB_PER_GB,
    ),
)


def held_out_curve(evaluations: Sequence[Mapping[str, Any]]) -> Curve:
    """Mean score of the held-out prompts, and where there were several samples of each, of the best of them."""
    prefix = "val/score/"
    best = sorted({name for row in evaluations for name in row if name.startswith(f"{prefix}best@")})
    names = {f"{prefix}mean": "mean", **{name: name.removeprefix(prefix) for name in best}}
    return Curve("held-out score", "score", names, "there was no evaluation: data.val_files, trainer.eval_every")


def accepted_share(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of an iteration's guesses that were right; nothing where there were none."""
    drafted = row.get("speculation/drafted")
    return {"speculation/accepted_share": row["speculation/accepted"] / drafted} if drafted else {}
