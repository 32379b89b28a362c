"""What may enter the engine: a request is checked as a whole before anything is changed by it."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from rlhfuse.config.spec import ModelSpec
from rlhfuse.errors import InputError
from rlhfuse.gen.sequence import SamplingParams, Sequence


def new_sequence(
    sample_id: int,
    prompt: list[int],
    params: SamplingParams,
    spec: ModelSpec,
    cache_tokens: int,
    *,
    can_detokenize: bool,
) -> Sequence:
    """The sequence of a request. `cache_tokens`: what all KV blocks together hold. Raises InputError."""
    name = f"sample {sample_id}"
    if not prompt:
        raise InputError(f"{name} has an empty prompt; give at least one token")
    prompt = [_token(name, token, spec.vocab) for token in prompt]
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


def _token(name: str, token: SupportsIndex, vocab: int) -> int:
    """An element of a list, an array or a tensor as a number."""
    try:
        number = operator.index(token)
    except TypeError:
        number = -1
    if not 0 <= number < vocab:
        raise InputError(f"{name}: token {token!r} is not an id in [0, {vocab})")
    return number
