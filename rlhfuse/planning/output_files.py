"""The files that a run will write, and how large those are that may be large.

Knows nothing of who writes them; docs/formats.md says what is in each.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhfuse.config.settings import RunConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.planning.memory import readable_bytes

CHECKPOINT_BYTES = 12  # per parameter that trains: float32 weight and Adam's two moments


def output_files(config: RunConfig, specs: Mapping[str, ModelSpec], element_bytes: int) -> tuple[tuple[str, str], ...]:
    """Names within the run directory, which comes first, each with what it is."""
    trainer, trained = config.trainer, config.trained()
    counts = {role: specs[role].parameters(scalar_head=role.scalar_head) for role in trained}
    boards = [name for name, on in (("tensorboard/", trainer.tensorboard), ("wandb/", trainer.wandb != "off")) if on]
    traced = trainer.trace_iterations
    rows = [
        (trainer.output_dir or "runs/<config name>-<time>", "the run directory; it holds"),
        ("config.yaml", "this configuration, defaults filled in"),
        ("plan.json, schedule.json", "this plan, and the training schedule"),
        ("metrics.jsonl", f"one line for each of {trainer.iterations} iterations"),
        *((name, "the same metrics") for name in boards),
        ("trace.json", f"time line of the last {traced} iterations, predicted and measured"),
        ("samples.jsonl", f"{trainer.sample_texts} samples of each iteration as text"),
        ("costs.json", "what work cost in this run, for fusion.profile of a later one"),
    ]
    if trainer.save_every:
        size = readable_bytes(CHECKPOINT_BYTES * sum(counts.values()))
        often = f"every {trainer.save_every} iterations, {size} each; the last {trainer.keep_checkpoints} are kept"
        rows.append(("checkpoints/iteration-N/", often))
    else:
        remedy = "a run that dies begins again; trainer.save_every=N saves one every N iterations"
        rows.append(("(no checkpoints)", remedy))
    if trainer.export:
        rows += [
            (f"export/{role}/", f"{readable_bytes(count * element_bytes)}, in Hugging Face layout, at the end")
            for role, count in counts.items()
        ]
    return (*rows, ("finished.json", "when all iterations are done"))
