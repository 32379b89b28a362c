"""Hidden states and an output layer to be multiplied, a group of one rank, and how much memory lives at once."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, HIDDEN, PADDED = 37, 24, 208


def drawn(vocab: int):
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)
    weight[vocab:] = 1e4  # would win every softmax
    targets = torch.randint(0, vocab, (ROWS,), generator=generator)
    targets[:2] = torch.tensor([0, vocab - 1])
    return x, weight, targets, torch.randn(2, ROWS, generator=generator)


def softmax_outputs(x, weight, targets, vocab: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the targets and entropies, by whole logits."""
    logprobs = (x @ weight[:vocab].t() / temperature).log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def alone(rank: int):
    """A group of this rank."""
    import torch.distributed as dist

    return dist.new_group([rank], use_local_synchronization=True)


class Peak(TorchDispatchMode):
    """Bytes of the storages that are made under it and live at once, at most; views of `given` tensors are not."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size
