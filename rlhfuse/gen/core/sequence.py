"""One sample in the engine: its request, its state and its result.

prompt tokens            tokens so far, drawn but for the observed ones between two turns
|------------------------|----------->            total_tokens
|------ in the KV cache ------|~~~~~~~>           computed_tokens, then pending_tokens (one when decoding)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, SupportsIndex

import numpy as np

from rlhfuse.base.errors import InputError
from rlhfuse.base.json_values import LARGEST
from rlhfuse.base.token_spans import TokenSpan
from rlhfuse.config.spec import ModelSpec
from rlhfuse.config.values import LARGEST_REAL

FinishReason = Literal["stop", "length", "error", "turn"]
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one sample are drawn."""

    temperature: float = 1.0  # 0 = greedy: the first of the most likely tokens, which top-k and top-p always leave
    top_k: int = 0  # draw from the k most likely tokens, and those as likely as the k-th; 0 = off
    top_p: float = 1.0  # draw from the most likely tokens with this much probability, and those as likely as the last
    max_tokens: int = 128  # longest response
    min_tokens: int = 0  # no stop before so many tokens
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end the response; they are part of it
    stop: tuple[str, ...] = ()  # texts that end the response; they are part of it
    seed: int = 0
    ignore_eos: bool = False  # the model's own end tokens do not end the response
    # False: nobody reads them, and a greedy sample's may be NaN. Draws are the same: it is in no digest of requests.
    logprobs: bool = field(default=True, repr=False)
    # What would end the response ends a turn: the sample is parked until `Engine.observe` or `close`.
    turns: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name, kind in (("stop_token_ids", int), ("stop", str)):  # None is no end, as in other engines
            value = () if getattr(self, name) is None else getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, kind) else tuple(value))
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float):
                raise InputError(f"{name}={getattr(self, name)!r} must be a number")
        if not 0 <= self.temperature <= LARGEST_REAL:
            raise InputError(f"temperature={self.temperature!r:.40} must be 0 (greedy) or above, and finite")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p={self.top_p} must be in (0, 1]; 1 turns it off")
        for name, low in (("top_k", 0), ("max_tokens", 1), ("min_tokens", 0), ("seed", None)):
            value, limits = getattr(self, name), "" if low is None else f" in [{low}, {LARGEST}]"
            if type(value) is not int or low is not None and not low <= value <= LARGEST:
                raise InputError(f"{name}={value!r:.40} must be an integer{limits}")
        if any(type(token) is not int for token in self.stop_token_ids):
            raise InputError(f"stop_token_ids={self.stop_token_ids} must hold integers")
        if self.min_tokens > self.max_tokens:
            raise InputError(f"min_tokens={self.min_tokens} > max_tokens={self.max_tokens}; lower min_tokens")
        if wrong := [text for text in self.stop if not isinstance(text, str) or not text]:
            raise InputError(f"stop holds {wrong[0]!r:.40}, no text or an empty text; remove it")


@dataclass(frozen=True)
class GenerationResult:
    """A finished sample. `logprobs[i]` belongs to `tokens[i]`: after temperature, before top-k and top-p.

    They are NaN where a greedy sample's were not asked for.

    `finish_reason` is "stop" (an end token or stop text, part of `tokens`), "length", or "error" (the model gave
    numbers that are not finite; `tokens` holds what was drawn before). "turn": the sample is parked, not finished.
    """

    sample_id: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    entropies: tuple[float, ...] = ()  # of the distributions that `logprobs` are of, where the engine measures them
    observed: tuple[TokenSpan, ...] = ()  # of `tokens`, that were not drawn: logprobs and entropies are 0.0

    @property
    def turn_start(self) -> int:
        """Where the last turn begins in `tokens`."""
        return self.observed[-1][1] if self.observed else 0


@dataclass(eq=False)
class Sequence:
    """A sample in the making. The scheduler owns `block_table`, `computed_tokens`, `row` and the two prefix fields."""

    sample_id: int
    prompt: list[int]
    params: SamplingParams
    max_total_tokens: int  # prompt and response together, as the model's context allows
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    observed: list[TokenSpan] = field(default_factory=list)  # runs of `tokens` that came from outside
    finish_reason: FinishReason | None = None
    block_table: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    published_blocks: int = 0  # so many leading blocks are known to the prefix index
    prefix_node: int = 0  # name of the prefix that ends with the last of them
    row: int = -1  # in the running table; -1 while it does not run

    @property
    def total_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def turn_start(self) -> int:
        """The first of `tokens` that belongs to the running turn, or to the last one."""
        return self.observed[-1][1] if self.observed else 0

    @property
    def parked(self) -> bool:
        """Whether its turn is over and it waits for what is to be observed."""
        return self.finish_reason == "turn"

    @property
    def room(self) -> int:
        """Tokens that may be observed, so that one can be drawn behind them."""
        return self.max_total_tokens - self.total_tokens - 1

    @property
    def known_tokens(self) -> int:
        """Without one that was drawn and not read yet: `tokens` holds its place among the draws, `logprobs` nothing."""
        return len(self.prompt) + len(self.logprobs)

    @property
    def pending_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens) - self.computed_tokens

    @property
    def noise_stream(self) -> int:
        """Name of the sample's noise, 64 bits: (seed, sample id) through two rounds of splitmix64."""
        return _splitmix64(_splitmix64(self.params.seed) ^ (self.sample_id & _MASK64))

    def slice(self, start: int, end: int) -> list[int]:
        """Tokens start:end of prompt and response together."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.tokens[start - prompt : end - prompt]
        return self.prompt[start:end] + (self.tokens[: end - prompt] if end > prompt else [])

    def append(self, token: int, logprob: float) -> None:
        """Take the drawn token in; sets finish_reason when it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        drawn = len(self.tokens)
        if token in self.stop_ids and drawn >= self.params.min_tokens:
            self.finish_reason = "stop"
        elif len(self.prompt) + drawn >= self.max_total_tokens:
            self.finish_reason = "length"

    def end_turn(self) -> None:
        """Park it instead of finishing it, if it has turns and its response did not end for want of room."""
        if self.params.turns and self.finish_reason == "stop" and self.total_tokens < self.max_total_tokens:
            self.finish_reason = "turn"

    def observe(self, tokens: list[int]) -> None:
        """Begin a turn behind these tokens, for which there is room."""
        self.observed.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        if self.entropies:
            self.entropies += [0.0] * len(tokens)
        self.finish_reason = None

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None, f"sample {self.sample_id} is not finished"
        lists = tuple(self.prompt), tuple(self.tokens), tuple(self.logprobs)
        facts = self.finish_reason, tuple(self.entropies), tuple(self.observed)
        return GenerationResult(self.sample_id, *lists, *facts)


def stop_table(sequences: list[Sequence]) -> np.ndarray:
    """The tokens that end each sequence, [S, E] int64, unused columns -1, behind the used ones."""
    table = np.full((len(sequences), max(len(seq.stop_ids) for seq in sequences)), -1, np.int64)
    for row, seq in zip(table, sequences):
        row[: len(seq.stop_ids)] = sorted(seq.stop_ids)
    return table


def _splitmix64(word: int) -> int:
    """One round on a 64-bit number; other integers count modulo 2**64."""
    state = (word & _MASK64) + 0x9E3779B97F4A7C15 & _MASK64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
    return state ^ (state >> 31)


def new_sequence(
    sample_id: int, prompt: list[int], params: SamplingParams, spec: ModelSpec, cache_tokens: int, can_detokenize: bool
) -> Sequence:
    """The sequence of a request. `cache_tokens`: what all KV blocks together hold. Raises InputError."""
    name = f"sample {sample_id}"
    if not prompt:
        raise InputError(f"{name} has an empty prompt; give at least one token")
    prompt = check_tokens(name, prompt, spec.vocab)
    if params.stop and not can_detokenize:
        raise InputError("stop texts need a tokenizer; use stop_token_ids, or a model folder with tokenizer.json")
    stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else spec.eos_token_ids)
    wrong = next((t for t in params.stop_token_ids if not 0 <= t < spec.vocab), None)
    if wrong is not None:
        raise InputError(f"{name}: stop token {wrong} is not an id in [0, {spec.vocab})")
    if params.min_tokens and len(stop_ids) >= spec.vocab:
        raise InputError(f"{name}: every token ends it, but min_tokens={params.min_tokens}; lower it")
    total = len(prompt) + params.max_tokens
    sizes = f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens}"
    if total > spec.context:
        raise InputError(f"{name}: {sizes} leave the context of {spec.context} tokens; lower max_tokens")
    if total - 1 > cache_tokens:  # the last token is never run
        raise InputError(f"{name}: {sizes} leave the KV cache of {cache_tokens} tokens; raise num_blocks")
    return Sequence(sample_id, prompt, params, total, stop_ids)


def check_tokens(name: str, tokens: Iterable[SupportsIndex], vocab: int) -> list[int]:
    """Tokens of a list, an array or a tensor as numbers. Raises InputError for one outside the vocabulary."""
    numbers = []
    for token in tokens:
        try:
            numbers.append(operator.index(token))
        except TypeError:
            numbers.append(-1)
        if not 0 <= numbers[-1] < vocab:
            raise InputError(f"{name}: token {token!r} is not an id in [0, {vocab})")
    return numbers
