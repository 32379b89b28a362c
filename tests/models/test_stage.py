"""Packed tokens on their way to the device."""

import torch

from rlhfuse.models.stage import PackedTokens, by_dtype, together


def test_tensors_of_one_dtype_travel_in_one_copy():
    tensors = [
        torch.arange(5),
        torch.tensor([1.5, 2.5]),
        torch.arange(3, dtype=torch.int32),
        torch.arange(6).view(2, 3)[:, 1:],
        torch.empty(0),
    ]
    sent = []

    def send(flat: torch.Tensor) -> torch.Tensor:
        sent.append(flat)
        return flat.clone()

    arrived = by_dtype(tensors, send)
    assert [flat.dtype for flat in sent] == [torch.int64, torch.float32, torch.int32]
    for there, here in zip(arrived, tensors):
        assert there.dtype == here.dtype and torch.equal(there, here)
    for there, here in zip(together(tensors, torch.device("meta")), tensors):
        assert there.is_meta and there.shape == here.shape and there.dtype == here.dtype


def test_a_pack_knows_its_borders_on_the_host_and_each_tokens_place():
    packed, (index,) = PackedTokens.beside(
        [torch.tensor([1, 3])], torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3], dtype=torch.int32), torch.device("cpu")
    )
    assert packed.padding == 13 and packed.sequences.longest == 13 and len(packed) == 16
    assert packed.sequences.borders == (0, 1, 3, 16) == tuple(packed.sequences.cu_seqlens.tolist())
    assert packed.sequences.positions.tolist() == [0, 0, 1, *range(13)] and index.tolist() == [1, 3]
