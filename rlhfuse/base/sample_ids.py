"""The id of a sample, from which every random draw about it derives.

bit 62 ........ 39 | 38 ........ 16 | 15 ..... 0
    iteration      | prompt         | copy
"""

from __future__ import annotations

from rlhfuse.base.errors import InputError

BITS = ITERATION_BITS, PROMPT_BITS, COPY_BITS = 24, 23, 16


def sample_id(iteration: int, prompt: int, copy: int) -> int:
    """63-bit number, ascending in (iteration, place in its draw, copy). Raises InputError for one out of range."""
    for name, value, bits in zip(("iteration", "prompt", "copy"), (iteration, prompt, copy), BITS):
        if not 0 <= value < 2**bits:
            raise InputError(f"sample id: {name} {value} is outside 0..{2**bits - 1}")
    return (iteration << PROMPT_BITS | prompt) << COPY_BITS | copy


def sample_origin(number: int) -> tuple[int, int, int]:
    """Inverse of `sample_id`: (iteration, prompt, copy)."""
    prompt = number >> COPY_BITS
    return prompt >> PROMPT_BITS, prompt % 2**PROMPT_BITS, number % 2**COPY_BITS


def prompt_groups(numbers):
    """Samples of one prompt get one number: ids, an integer or an array of them, without their copy."""
    return numbers >> COPY_BITS
