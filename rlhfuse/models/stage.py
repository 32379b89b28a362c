"""One pipeline stage: packed tokens or a hidden state in, a hidden state or the model's output out.

    first stage:  tokens [T]          -> hidden [T, 1, H]
    last stage:   hidden [T, 1, H]    -> a LanguageOutput, or values [T] with a scalar head

Under sequence parallelism each of tp tensor ranks holds T/tp rows of a hidden state; tokens and outputs stay whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfuse.models.attention.packed.sequences import SequenceBorders
from rlhfuse.models.heads import LanguageOutput
from rlhfuse.models.layers.operations import operations_for
from rlhfuse.models.stack.flat_stack import FlatStack, Product
from rlhfuse.parallel.device import current_device_is_cpu
from rlhfuse.parallel.offload import page_locked

LossFunction = Callable[[Any, int], Tensor]  # (last stage's output, micro-batch) -> scalar loss


@dataclass(frozen=True)
class PackedTokens:
    """Sequences laid end to end."""

    tokens: Tensor  # [T] int64
    sequences: SequenceBorders
    padding: int = 0  # so many last tokens belong to a dummy sequence whose outputs nobody reads

    @staticmethod
    def pack(sequences: Sequence[Sequence[int]], device: torch.device, shards: int = 1) -> PackedTokens:
        """Pack `sequences` (at least one, none empty), filled up to equal parts of a stage's `shards` tensor ranks."""
        borders = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
        tokens = torch.tensor([token for s in sequences for token in s])
        return PackedTokens.beside((), tokens, borders, device, shards)[0]

    @staticmethod
    def beside(
        others: Sequence[Tensor],
        tokens: Tensor,
        cu_seqlens: Tensor,
        device: torch.device,
        shards: int = 1,
        outbox: Outbox | None = None,
    ) -> tuple[PackedTokens, list[Tensor]]:
        """The same of packed tokens [T] int64 and their borders [N+1] int32 in host memory, and what `others` there are
        on the device, sent together."""
        padding = padded_rows(len(tokens), device, shards) - len(tokens)
        if padding:
            tokens = torch.nn.functional.pad(tokens, (0, padding))
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + padding])
        lengths = cu_seqlens.diff()
        positions = torch.arange(len(tokens)) - torch.repeat_interleave(cu_seqlens[:-1], lengths)
        tokens, positions, there, *rest = together([tokens, positions, cu_seqlens, *others], device, outbox)
        sequences = SequenceBorders(there, positions, tuple(cu_seqlens.tolist()), int(lengths.max()))
        return PackedTokens(tokens, sequences, padding), rest

    def __len__(self) -> int:
        return len(self.tokens)


def padded_rows(tokens: int, device: torch.device, shards: int) -> int:
    """Rows of so many packed tokens, filled up to equal parts of `shards` tensor ranks."""
    return max(-(-tokens // shards), operations_for(device).least_rows) * shards


class Outbox:
    """Page-locked host memory for what is sent to a device in the course of a step.

    It is taken before the step: while a device computes, or waits for another rank, the driver may let who asks for
    page-locked memory wait too.
    """

    ALIGNMENT = 64  # bytes at which a piece begins
    MOST_DTYPES = 4  # of what is sent at once

    def __init__(self) -> None:
        self._memory, self._taken = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, nbytes: int) -> None:
        """Begin a step that sends `nbytes`; all that was put in before must have arrived."""
        if nbytes > self._memory.nbytes:
            self._memory = page_locked(nbytes)
        self._taken = 0

    def put(self, flat: Tensor) -> Tensor:
        """A copy of it here, [n] as it is, until the next `empty`."""
        piece = self._memory[self._taken :][: flat.nbytes].view(flat.dtype)
        self._taken += -(-flat.nbytes // self.ALIGNMENT) * self.ALIGNMENT
        return piece.copy_(flat)


def together(tensors: Sequence[Tensor], device: torch.device, outbox: Outbox | None = None) -> list[Tensor]:
    """Tensors in host memory as they are on the device: those of one dtype by one copy, for which nobody waits."""
    if device.type == "cpu":
        return list(tensors)
    ready = outbox.put if outbox else Tensor.pin_memory if device.type == "cuda" else Tensor.contiguous
    return by_dtype(tensors, lambda flat: ready(flat).to(device, non_blocking=True))


def by_dtype(tensors: Sequence[Tensor], send: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What `send` makes of the tensors, called once for all of one dtype, laid end to end."""
    sent: dict[int, Tensor] = {}
    for dtype in {tensor.dtype: None for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = torch.cat([tensors[place].flatten() for place in places])
        parts = send(flat).split([tensors[place].numel() for place in places])
        sent |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts)}
    return [sent[place] for place in range(len(tensors))]


class PipelineStage:
    """A built model part and its two ends. `shards`: tensor ranks that a hidden state is cut over, 1 if it is whole."""

    def __init__(self, model: torch.nn.Module, *, first: bool, last: bool, scalar_head: bool) -> None:
        self.model = model
        self.first = first
        self.last = last
        self.scalar_head = scalar_head
        self._core: Any = getattr(model, "module", model)
        config = self._core.config
        self.shards: int = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self._hidden: int = config.hidden_size
        self._on_cpu = not next(model.parameters()).is_cuda

    @property
    def stack(self) -> FlatStack:
        """Its decoder layers."""
        return self._core.decoder

    def hidden_shape(self, rows: int) -> tuple[int, int, int]:
        """Shape of the hidden state of so many packed tokens between two stages, and of its gradient, on one rank."""
        return rows // self.shards, 1, self._hidden

    def running(self) -> contextlib.AbstractContextManager[None]:
        """To be open while this stage runs, forward or backward."""
        return current_device_is_cpu() if self._on_cpu else contextlib.nullcontext()

    def forward(self, batch: PackedTokens, hidden_T1H: Tensor | None) -> Any:
        """Run this stage. `hidden_T1H` is the stage before's output, None on the first stage."""
        self._core.set_input_tensor(hidden_T1H)
        with self.running():
            out = self.compute(batch)
        self._core.set_input_tensor(None)  # Megatron would hold it until the next forward, phases later
        return out

    def compute(self, batch: PackedTokens) -> Any:
        """The same with the input already set, as Megatron's own schedules do it."""
        tokens = batch.tokens[None]
        out = self.model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=batch.sequences)
        if not self.last:
            return out
        out = out[0]  # Megatron returns [1, T, 1 or H]
        if self.scalar_head:
            return out[:, 0]
        core = self._core
        tied = core.share_embeddings_and_output_weights
        weight = core.shared_embedding_or_output_weight() if tied else core.output_layer.weight
        return LanguageOutput(out, weight, core.output_layer)


class TrainingStage:
    """A stage that trains: keeps a micro-batch's input and output from its forward to its backward.

    A split backward leaves the weights of linear layers to `backward_weight`, and keeps for it what these need.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.stage = stage
        self.peak_live = 0  # most micro-batches kept at once, which the schedule predicts
        self._kept: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._deferred: dict[int, list[Product]] = {}

    @property
    def splits(self) -> bool:
        """Whether backwards are split."""
        return self.stage.stack.deferred is not None

    def split_backward(self, split: bool) -> None:
        """Split coming backwards, or do not."""
        self.stage.stack.deferred = [] if split else None

    def forward(
        self, microbatch: int, batch: PackedTokens, hidden_T1H: Tensor | None, loss: LossFunction
    ) -> Tensor | None:
        """Forward one micro-batch; returns the hidden state to send, None on the last stage."""
        if hidden_T1H is not None:
            hidden_T1H.requires_grad_(True)
        out = self.stage.forward(batch, hidden_T1H)
        if self.stage.last:
            out = loss(out, microbatch)
        self._kept[microbatch] = (hidden_T1H, out)
        self.peak_live = max(self.peak_live, len(self._kept) + len(self._deferred))
        return None if self.stage.last else out.detach()

    def backward(self, microbatch: int, gradient_T1H: Tensor | None) -> Tensor | None:
        """Backward one micro-batch; returns the gradient of its input to send, None on the first stage."""
        hidden, out = self._kept.pop(microbatch)
        with self.stage.running():
            torch.autograd.backward(out, grad_tensors=gradient_T1H)
        if (products := self.stage.stack.deferred) is not None:
            self._deferred[microbatch], self.stage.stack.deferred = products, []
        return None if hidden is None else hidden.grad

    def backward_weight(self, microbatch: int) -> None:
        """The rest of a split backward."""
        with self.stage.running():
            self.stage.stack.add(self._deferred.pop(microbatch))
