"""TRL's GRPO for end_to_end.py, with the Python of TRL's own environment: one JSON object of the step times.

Where TRL has a slower default for a CPU (bfloat16, gradient checkpointing) the faster choice is made for it. A step's
seconds are from the end of one step to the end of the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlhfuse.data.sentiment import vader


class StepClock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    arguments = SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(arguments.threads)
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    batch = arguments.prompts_per_step * arguments.generations
    rows = [json.loads(line) for line in Path(arguments.prompts).read_text().splitlines()]
    # repeated, so that no epoch ends within the run
    rows *= -(-arguments.steps * arguments.prompts_per_step // len(rows))
    config = GRPOConfig(
        output_dir=arguments.folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=batch // ranks,
        num_generations=arguments.generations,
        max_completion_length=arguments.tokens,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant",
        seed=arguments.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    clock = StepClock()
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=vader,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    trainer.train()
    if trainer.accelerator.is_main_process:
        logged = [row for row in trainer.state.log_history if "reward" in row]
        found = {
            "step_seconds": [after - before for before, after in zip(clock.ends, clock.ends[1:])],
            "reward": [row["reward"] for row in logged],
            "tokens": [row["completions/mean_length"] for row in logged],
            "versions": {"trl": trl.__version__, "torch": torch.__version__},
        }
        Path(arguments.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way, or keep it from ending
