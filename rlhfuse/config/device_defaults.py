"""What the configuration leaves to the device: the format of numbers, tokens of a cache block, rows of guesses.

On CPU float32, of which results are exact; on GPUs what their kernels are fast with.
"""

from __future__ import annotations

from rlhfuse.base.errors import InputError
from rlhfuse.base.parallel_layout import ParallelLayout
from rlhfuse.config.settings import RunConfig, TrainerConfig
from rlhfuse.config.values import AUTO, known

BLOCK_TOKENS = 16  # flashinfer's smallest, and enough for a Triton tile's row of loads: little is wasted at ends


def resolve_device(config: RunConfig) -> RunConfig:
    """`config` with values for what is auto of trainer.dtype and rollout.block_tokens; on GPUs without guesses.

    Raises InputError where guesses are asked for on GPUs.
    """
    rollout, gpu = config.rollout, is_for_gpus(config.trainer)
    if gpu and rollout.draft_rows not in (0, AUTO):
        raise InputError(f"rollout.draft_rows={rollout.draft_rows}: tokens are guessed on CPU alone; use 0 on GPUs")
    dtype = known(config.trainer.dtype, "bfloat16" if gpu else "float32")
    rows = known(rollout.draft_rows, 0 if gpu else AUTO)  # on CPU the engine measures and decides
    block = known(rollout.block_tokens, BLOCK_TOKENS)
    return config.with_(trainer={"dtype": dtype}, rollout={"block_tokens": block, "draft_rows": rows})


def without_shared_graphs(config: RunConfig) -> RunConfig:
    """`config` with rollout.cuda_graphs off where ranks share a GPU under tensor parallelism: what they add up passes
    through the host. A generation layout that is auto is looked at when it is chosen."""
    generation = config.parallel.generation
    if config.trainer.share_gpu and generation != AUTO and ParallelLayout.parse(generation).tp > 1:
        return config.with_(rollout={"cuda_graphs": False})
    return config


def is_for_gpus(trainer: TrainerConfig) -> bool:
    """As the device says; where it is open, as the hardware does that the run is planned for."""
    kind = trainer.hardware.partition(":")[0]  # of a list the first: it is of GPUs, or of CPUs alone
    return trainer.device == "cuda" or (trainer.device == AUTO and kind not in (AUTO, "cpu"))
