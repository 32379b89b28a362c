"""Plans of real model shapes on 1 to 512 H100: `PYTHONPATH=tests python -m testkit.plan_sweep [MODEL ...]` prints a row
for each model, number of GPUs and algorithm: seconds of an iteration, the fullest phase, or why there is none."""

import sys
import time

from rlhfuse.base.errors import InputError
from rlhfuse.config.device_defaults import resolve_device
from rlhfuse.config.load import ALL_AUTO
from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.planning.candidate import draft_plan
from rlhfuse.planning.job import Job
from rlhfuse.planning.planner import make_plan
from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.settle import settle

GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ALGORITHMS = ("ppo", "grpo")
SHAPES = {  # family, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, tied; as published
    "llama-3.2-1b": ("llama", 16, 2048, 32, 8, 64, 8192, 128256, True),
    "llama-3.2-3b": ("llama", 28, 3072, 24, 8, 128, 8192, 128256, True),
    "llama-3.1-8b": ("llama", 32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama-3.1-70b": ("llama", 80, 8192, 64, 8, 128, 28672, 128256, False),
    "llama-3.1-405b": ("llama", 126, 16384, 128, 8, 128, 53248, 128256, False),
    "qwen2.5-0.5b": ("qwen2", 24, 896, 14, 2, 64, 4864, 151936, True),
    "qwen2.5-1.5b": ("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, True),
    "qwen2.5-7b": ("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, False),
    "qwen2.5-14b": ("qwen2", 48, 5120, 40, 8, 128, 13824, 152064, False),
    "qwen2.5-32b": ("qwen2", 64, 5120, 40, 8, 128, 27648, 152064, False),
    "qwen2.5-72b": ("qwen2", 80, 8192, 64, 8, 128, 29568, 152064, False),
    "qwen3-0.6b": ("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True),
    "qwen3-4b": ("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, True),
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, False),
    "qwen3-14b": ("qwen3", 40, 5120, 40, 8, 128, 17408, 151936, False),
    "mistral-7b-v0.3": ("mistral", 32, 4096, 32, 8, 128, 14336, 32768, False),
}


def config_of(algorithm: str, **trainer) -> RunConfig:
    """1,024 samples of 1,024 + 2,048 tokens; everything is left to the plan. GRPO has no critic; both have a function
    as reward."""
    config = RunConfig().with_(
        data={"max_prompt_tokens": 1024},
        reward={"function": "rewards:one", "signature": "verl"},
        rollout={"prompts_per_iteration": 256, "samples_per_prompt": 4, "max_response_tokens": 2048},
        algorithm={"name": algorithm, "minibatches": 4},
        fusion={"search_seconds": 1.0, "library": ""},
        parallel=ALL_AUTO,
        trainer={"device": "cuda", "hardware": "h100", "recompute": "auto", **trainer},
    )
    return resolve_device(config.with_(parallel=dict.fromkeys(("reference_inference", "critic_inference"), "auto")))


def spec_of(model: str) -> ModelSpec:
    family, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, tied = SHAPES[model]
    bias, norm = family == "qwen2", family == "qwen3"
    return ModelSpec(family, layers, hidden, heads, kv_heads, head_dim, mlp, vocab, 32768, tied, bias, False, norm)


def plan_of(model: str, gpus: int, algorithm: str, **trainer) -> PlanReport:
    config = config_of(algorithm, **trainer)
    run = settle(Job(config, dict.fromkeys(config.roles(), spec_of(model)), gpus))
    return PlanReport.of(make_plan(draft_plan(run)))


def main() -> None:
    print("| model | GPUs | algorithm | seconds | fullest phase | planned in |\n|---|---|---|---|---|---|", flush=True)
    for model in sys.argv[1:] or SHAPES:
        for gpus in GPUS:
            for algorithm in ALGORITHMS:
                begun = time.monotonic()
                try:
                    plan = plan_of(model, gpus, algorithm)
                    fullest = max(plan.memory.phases, key=plan.memory.needed_bytes)
                    share = plan.memory.needed_bytes(fullest) / plan.memory.limit
                    told = f"{plan.seconds.fused:.4g} | {fullest.phase} {share:.1%}"
                except InputError as error:
                    told = f"- | {error}"
                print(f"| {model} | {gpus} | {algorithm} | {told} | {time.monotonic() - begun:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
