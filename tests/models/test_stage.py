"""Packed tokens on their way to the device."""

import torch

from rlhfuse.models.stage import PackedTokens


def test_a_pack_knows_its_borders_on_the_host_and_each_tokens_place():
    packed, (index,) = PackedTokens.beside(
        [torch.tensor([1, 3])], torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3], dtype=torch.int32), torch.device("cpu")
    )
    assert packed.padding == 13 and packed.sequences.longest == 13 and len(packed) == 16
    assert packed.sequences.borders == (0, 1, 3, 16) == tuple(packed.sequences.cu_seqlens.tolist())
    assert packed.sequences.positions.tolist() == [0, 0, 1, *range(13)] and index.tolist() == [1, 3]
