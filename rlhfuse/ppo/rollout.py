"""Samples of one iteration: one sample (`Rollout`) and all of them packed (`RolloutBatch`).

A sample is its prompt followed by its response. Samples are packed without padding, N samples of T tokens, of which R
were drawn: of responses, without what was observed between turns. Whatever belongs to drawn tokens is one flat array
[R]. Rollouts are sorted by sample id before they are packed, so that who produced what, and when, never matters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhfuse.base.errors import InputError, NotFiniteError
from rlhfuse.base.token_spans import TokenSpan, drawn_spans


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sample on the CPU. Logprobs, values and entropies are float32, one per drawn token of the response.

    `finish_reason` is "stop", or "length" when the response was cut. The next three fields are None until the
    reference, critic and reward model have scored the sample, entropies unless generation measures them.
    """

    sample_id: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    old_logprobs: Tensor  # of the distribution that sampled, after temperature
    finish_reason: str
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    score: float | None = None
    entropies: Tensor | None = None  # of the same distributions
    observed: tuple[TokenSpan, ...] = ()  # runs of response tokens, between turns, that were not drawn
    failed: bool = False  # keeps its place, and counts nowhere

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_tokens", tuple(self.prompt_tokens))
        object.__setattr__(self, "response_tokens", tuple(self.response_tokens))
        if not self.prompt_tokens or not self.response_tokens:
            raise InputError(
                f"sample {self.sample_id} has {len(self.prompt_tokens)} prompt and {len(self.response_tokens)} response"
                " tokens; PPO needs at least one of each"
            )
        object.__setattr__(self, "observed", tuple(map(tuple, self.observed)))
        drawn = len(self.response_tokens)
        if self.observed:  # most have none, and a sample is made anew with each of its scores
            if any(start >= end for start, end in (*self.turns, *self.observed)):
                raise InputError(
                    f"sample {self.sample_id}: observed={self.observed} of {drawn} response tokens; "
                    "runs in ascending order are needed, with drawn tokens around each"
                )
            drawn = sum(end - start for start, end in self.turns)
        for name in _OF_ROLLOUTS:
            value = getattr(self, name)
            if value is None and name != "old_logprobs":
                continue
            array = torch.as_tensor(value, dtype=torch.float32, device="cpu").detach()
            if array.shape != (drawn,):
                raise InputError(
                    f"sample {self.sample_id}: {name} has shape {list(array.shape)}, "
                    f"not one number for each of {drawn} response tokens"
                )
            object.__setattr__(self, name, array)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length" and not self.failed

    @property
    def turns(self) -> list[TokenSpan]:
        """Runs of response tokens that were drawn, one after another."""
        return drawn_spans(self.observed, len(self.response_tokens))

    def pieces(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """All tokens before each turn, and those that it drew."""
        for start, end in self.turns:
            yield self.prompt_tokens + self.response_tokens[:start], self.response_tokens[start:end]

    def with_scores(
        self, ref_logprobs: Tensor | None = None, values: Tensor | None = None, score: float | None = None
    ) -> Rollout:
        """A copy that gained what is given; None leaves a field as it is."""
        given = {"ref_logprobs": ref_logprobs, "values": values, "score": score}
        given = {name: value for name, value in given.items() if value is not None}
        return replace(self, **given) if given else self

    def scores_alone(self) -> tuple[Any, ...]:
        """What `with_scores` takes, of a copy that another rank has; as arrays of numpy, see `__reduce__`."""
        values = self.ref_logprobs, self.values, self.score
        return tuple(value.numpy() if isinstance(value, Tensor) else value for value in values)

    def to_bytes(self) -> bytes:
        """Bit for bit: a line of JSON, then the float32 numbers of the arrays that it names."""
        arrays = {name: getattr(self, name) for name in _OF_ROLLOUTS}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in arrays}
        line = json.dumps(plain | {"arrays": list(arrays)})
        return b"\n".join((line.encode(), b"".join(array.numpy().tobytes() for array in arrays.values())))

    @staticmethod
    def from_bytes(data: bytes) -> Rollout:
        """Inverse of `to_bytes`; what the bytes say is only ever read as numbers and text."""
        line, _, numbers = data.partition(b"\n")
        plain = json.loads(line)
        names = plain.pop("arrays")
        arrays = torch.frombuffer(bytearray(numbers), dtype=torch.float32).view(len(names), -1)
        return Rollout(**plain | dict(zip(names, arrays)))

    def __reduce__(self) -> tuple[type[Rollout], tuple[Any, ...]]:
        """Pickled bit for bit, as arrays of numpy: a tensor's own way takes ten times as long."""
        values = (getattr(self, field.name) for field in fields(self))
        return Rollout, tuple(value.numpy() if isinstance(value, Tensor) else value for value in values)


def given(array: Tensor | None) -> Tensor:
    """A field of a batch that an earlier step has set."""
    assert array is not None, "this field of the batch has not been computed yet"
    return array


def segment_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """Positions start, start+1, ..., start+length-1 of every segment, concatenated: int64 [sum of lengths]."""
    first = lengths.cumsum(0) - lengths  # where each segment begins in the result
    return torch.repeat_interleave(starts - first, lengths) + torch.arange(int(lengths.sum()), device=lengths.device)


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Packed samples. Fields that are None have not been computed yet; each step returns a new object.

    tokens      p p p r r | p p r o r | ...      o: observed, of the response and not of R
    cu_seqlens  0          5           10
    """

    tokens: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [N+1]
    prompt_lengths: Tensor  # int64 [N]
    sample_ids: Tensor  # int64 [N]
    truncated: Tensor  # bool [N]
    old_logprobs: Tensor  # float32 [R]
    ref_logprobs: Tensor | None = None  # float32 [R]
    values: Tensor | None = None  # float32 [R], the critic's before any update ("old values")
    scores: Tensor | None = None  # float32 [N]
    token_rewards: Tensor | None = None  # float32 [R]
    advantages: Tensor | None = None  # float32 [R]
    returns: Tensor | None = None  # float32 [R]
    counted: Tensor | None = None  # bool [R], what losses and whitening count; None: all
    entropies: Tensor | None = None  # float32 [R], of the distribution that sampled, after temperature
    high_entropy: Tensor | None = None  # bool [R], what the policy's term counts of these; None: all
    observed: Tensor | None = None  # bool [T], response tokens that were not drawn; None: all were
    failed: Tensor | None = None  # bool [N], samples that count nowhere; None: none

    @staticmethod
    def from_rollouts(rollouts: Sequence[Rollout]) -> RolloutBatch:
        """Pack rollouts in strictly ascending order of sample id, all scored or none. Raises InputError."""
        ids = [rollout.sample_id for rollout in rollouts]
        if not ids or any(a >= b for a, b in zip(ids, ids[1:])):
            raise InputError(f"{len(ids)} rollouts must be non-empty, unique and sorted by sample id: {ids[:4]}...")

        def joined(name: str) -> Tensor | None:
            parts = [getattr(rollout, name) for rollout in rollouts]
            missing = [i for i, part in zip(ids, parts) if part is None]
            if len(missing) == len(parts):
                return None
            if missing:
                raise InputError(f"sample {missing[0]} has no {name} though others have; score every sample first")
            return torch.cat(parts) if isinstance(parts[0], Tensor) else torch.tensor(parts, dtype=torch.float32)

        rows = [rollout.prompt_tokens + rollout.response_tokens for rollout in rollouts]
        lengths = torch.tensor([0] + [len(row) for row in rows])
        failed = torch.tensor([rollout.failed for rollout in rollouts])
        batch = RolloutBatch(
            tokens=torch.tensor([token for row in rows for token in row], dtype=torch.int64),
            cu_seqlens=lengths.cumsum(0).to(torch.int32),
            prompt_lengths=torch.tensor([len(rollout.prompt_tokens) for rollout in rollouts]),
            sample_ids=torch.tensor(ids, dtype=torch.int64),
            truncated=torch.tensor([rollout.truncated for rollout in rollouts]),
            old_logprobs=given(joined("old_logprobs")),
            ref_logprobs=joined("ref_logprobs"),
            values=joined("values"),
            entropies=joined("entropies"),
            scores=joined("score"),
            observed=_observed(rollouts, lengths.cumsum(0).tolist()),
        )
        return batch.with_fields(failed=failed).counting(~failed) if failed.any() else batch

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample, prompt and response: int64 [N]."""
        return self.cu_seqlens.long().diff()

    @property
    def response_lengths(self) -> Tensor:
        return self.lengths - self.prompt_lengths

    @property
    def drawn_lengths(self) -> Tensor:
        """Response tokens of each sample that were drawn, whether they count or not: int64 [N], R together."""
        if self.observed is None:
            return self.response_lengths
        before = torch.nn.functional.pad(self.observed.cumsum(0), (1, 0))
        return self.response_lengths - before[self.cu_seqlens.long()].diff()

    @property
    def response_tokens(self) -> int:
        """R, whether they count or not."""
        return len(self.old_logprobs)

    @property
    def owners(self) -> Tensor:
        """The sample of each drawn token, by its place: int64 [R]."""
        return torch.arange(len(self), device=self.tokens.device).repeat_interleave(self.drawn_lengths)

    @property
    def counted_lengths(self) -> Tensor:
        """Response tokens of each sample that losses count: int64 [N]."""
        if self.counted is None:
            return self.drawn_lengths
        return torch.zeros_like(self.prompt_lengths).index_add(0, self.owners, self.counted.long())

    @property
    def counted_tokens(self) -> int:
        """Response tokens that losses count."""
        return self.response_tokens if self.counted is None else int(self.counted.sum())

    def counting(self, samples: Tensor) -> RolloutBatch:
        """A new batch in which of these samples alone (bool [N]) the tokens count, as far as they did. All keep their
        place, so that batch size, cuts and seeds stay."""
        counted = samples[self.owners]
        return replace(self, counted=counted if self.counted is None else self.counted & counted)

    @property
    def intact(self) -> RolloutBatch:
        """The samples that have not failed, of which there may be none."""
        return self if self.failed is None else self.select((~self.failed).nonzero().flatten())

    @property
    def response_index(self) -> Tensor:
        """Positions in `tokens` of the drawn tokens: int64 [R]."""
        index = segment_index(self.cu_seqlens[:-1].long() + self.prompt_lengths, self.response_lengths)
        return index if self.observed is None else index[~self.observed[index]]

    @property
    def prediction_index(self) -> Tensor:
        """Positions in `tokens` whose logits and values predict the drawn tokens, each one before its: int64 [R]."""
        return self.response_index - 1

    def with_fields(self, **arrays: Tensor | None) -> RolloutBatch:
        """A new batch with these fields set."""
        return replace(self, **arrays)

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """The samples at these positions of the batch, in the given order: a mini-batch or a micro-batch."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.tokens.device)
        lengths, responses = self.lengths, self.drawn_lengths
        tokens = segment_index(self.cu_seqlens[:-1].long()[chosen], lengths[chosen])
        flat = segment_index((responses.cumsum(0) - responses)[chosen], responses[chosen])
        places = {name: tokens for name in ("tokens", "observed")} | {name: chosen for name in _PER_SAMPLE}
        places |= {name: flat for name in _PER_RESPONSE_TOKEN}
        arrays = {name: getattr(self, name) for name in places}
        picked = {name: array[places[name]] for name, array in arrays.items() if array is not None}
        borders = torch.nn.functional.pad(lengths[chosen].cumsum(0), (1, 0)).to(torch.int32)
        return replace(self, cu_seqlens=borders, **picked)

    def check_finite(self) -> None:
        """Raise NotFiniteError naming the first sample that was given a number which is none; a score is float32."""
        owners = self.owners
        for what, numbers, samples in (
            ("score", self.scores, torch.arange(len(self))),
            ("value of the critic", self.values, owners),
            ("log-probability of the reference model", self.ref_logprobs, owners),
        ):
            if numbers is not None and len(wrong := (~numbers.isfinite()).nonzero()):
                sample, number = self.sample_ids[samples[wrong[0]]], numbers[wrong[0]]
                raise NotFiniteError(f"sample {int(sample)}: a {what} is {float(number)}")

    def digest(self) -> str:
        """SHA-256 of what was generated: ids, lengths, tokens, bits of old_logprobs; of what was observed or failed."""
        sha = hashlib.sha256()
        drawn = self.sample_ids, self.cu_seqlens, self.prompt_lengths, self.tokens, self.old_logprobs
        for array in (*drawn, *(some for some in (self.observed, self.failed) if some is not None)):
            sha.update(array.cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()


def _observed(rollouts: Sequence[Rollout], begins: Sequence[int]) -> Tensor | None:
    """Which tokens of these, packed from `begins` on, were observed; None where none was."""
    if not any(rollout.observed for rollout in rollouts):
        return None
    observed = torch.zeros(begins[-1], dtype=torch.bool)
    for rollout, begin in zip(rollouts, begins):
        response = begin + len(rollout.prompt_tokens)
        for start, end in rollout.observed:
            observed[response + start : response + end] = True
    return observed


_PER_SAMPLE = ("prompt_lengths", "sample_ids", "truncated", "scores", "failed")
_OF_ROLLOUTS = ("old_logprobs", "ref_logprobs", "values", "entropies")
_PER_RESPONSE_TOKEN = (*_OF_ROLLOUTS, "token_rewards", "advantages", "returns", "counted", "high_entropy")
