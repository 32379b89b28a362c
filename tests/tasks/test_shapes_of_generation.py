"""Shapes of decode steps: how many a generation has, counted step by step."""

import random

import pytest
from testkit.profiles import share

from rlhfuse.tasks.decode_shapes import rounded_rows, rounded_width, shapes_of_generation

CONTEXT, BLOCK = 4096, 16


def decoded(outputs: list[int], prompt: int, most: int) -> set[tuple[int, int]]:
    """Shapes of sequences that begin together, each with so many tokens to decode after its first."""
    shapes = set()
    for step in range(1, max(outputs) + 1):
        rows = sum(output >= step for output in outputs)
        blocks = -(-(prompt + step) // BLOCK)
        shapes.add((rounded_rows(rows, most), rounded_width(blocks, CONTEXT // BLOCK, BLOCK)))
    return shapes


@pytest.mark.parametrize("sequences, prompt, longest", [(1, 10, 900), (64, 200, 2000), (200, 500, 3000), (17, 1, 100)])
def test_a_generation_has_as_many_as_are_counted(sequences, prompt, longest):
    draw = random.Random(sequences)
    wanted = shapes_of_generation(sequences, range(prompt + 1, prompt + longest), CONTEXT, BLOCK, 256)
    for _ in range(share(20)):
        outputs = [draw.randint(1, longest) for _ in range(sequences)]
        assert len(decoded(outputs, prompt, 256)) <= wanted
    ends = [1 + number * (longest - 1) // sequences for number in range(sequences)] + [longest]
    assert len(decoded(ends[1:], prompt, 256)) == wanted, "all end at different steps"
