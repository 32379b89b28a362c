"""Tokenizers of the run's models: whether they name the same tokens by the same ids, and which tokens end a text.

Models fit together when their tokenizers do, whatever the number of their embedding rows. All read ids, never text, so
what counts is which token an id is; the actor's tokens must be those of every other model, which may have more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from operator import itemgetter
from pathlib import Path
from string import ascii_letters
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from rlhfuse.base.errors import InputError
from rlhfuse.base.files import is_listed
from rlhfuse.base.json_values import read_json
from rlhfuse.config.load import shortened
from rlhfuse.config.settings import RolloutConfig
from rlhfuse.config.spec import ModelSpec
from rlhfuse.tasks.role import POLICY, Role

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SPECIAL = ("bos_token", "eos_token", "unk_token")  # padding is never fed
TEMPLATE_SECONDS = 10.0  # of one prompt: the sandbox bounds a loop, but not loops in loops
# Before a template: strftime_now of transformers reads a clock, each process its own.
_DAY = """{%- macro strftime_now(format) -%}{%- set said = namespace(text=format) -%}
{%- for kind, text in KINDS.items() -%}{%- set said.text = said.text | replace(kind, text) -%}{%- endfor -%}
{{- said.text -}}{%- endmacro %}
"""
_FIX = "all models read the same tokens, so take one with the actor's tokenizer"


def has_tokenizer(path: Path) -> bool:
    return any(is_listed(path / name) for name in FILES)


def read_tokenizer(path: Path) -> Any:
    """The folder's tokenizer; code that lies in the folder is never run. Raises InputError for one that is no other."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from rlhfuse.models.hf_folder import carried_files  # torch, for which a run without a tokenizer need not wait

    if not has_tokenizer(path):
        raise InputError(f"{path} has no tokenizer files; set actor.tokenizer to a folder that has them")
    carried_files(path)  # of which one that cannot be read would be passed over
    said = read_json(file, own=False) if is_listed(file := path / "tokenizer_config.json") else {}
    if isinstance(said, dict) and said.get("auto_map"):
        fix = "take another, or remove auto_map where a tokenizer of transformers reads its files"
        raise InputError(f"{file}: auto_map asks to run code of the folder, which is not done; {fix}")
    most = said.get("model_max_length") if isinstance(said, dict) else None
    if isinstance(most, bool) or not isinstance(most, (int, float, type(None))):
        raise InputError(f"{file}: model_max_length is {str(most)[:40]!r}; write a number without quotes")
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken file
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"tokenizer of {path} cannot be read: {reason}") from None
    with suppress(TemplateSyntaxError):  # which is said when it is used
        for _, kind, value in Environment().lex("\n".join(_templates(tokenizer).values())):
            if (kind, value) == ("operator", "**") or (kind == "integer" and len(value) > 7):
                why = f"its chat template has {value[:20]}, which may compute for longer than any time limit"
                raise InputError(f"tokenizer of {path}: {why}; take another template")
    return tokenizer


def load_tokenizer(path: Path, spec: ModelSpec) -> Any:
    """As `read_tokenizer`, with ids inside the model's vocabulary alone."""
    tokenizer = read_tokenizer(path)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= largest < spec.vocab:
        raise InputError(
            f"tokenizer {path} has ids up to {largest}, the model's vocabulary is {spec.vocab}; use the model's own"
        )
    return tokenizer


def _templates(tokenizer: Any) -> dict[str, str]:
    """Its chat templates by name."""
    found = tokenizer.chat_template or ""
    return found if isinstance(found, dict) else {"default": str(found)}


def fix_day(tokenizer: Any, day: str) -> None:
    """Let chat templates write `day` (2026-11-28), whatever a clock says."""
    kinds = [flag + letter for letter in ascii_letters for flag in ("%", "%-")]
    said = {"%%": "\0", **{kind: date.fromisoformat(day).strftime(kind) for kind in kinds}, "\0": "%"}
    macro = _DAY.replace("KINDS", repr(said))
    found = {name: macro + text if "strftime_now" in text else text for name, text in _templates(tokenizer).items()}
    if found != _templates(tokenizer):
        tokenizer.chat_template = found if isinstance(tokenizer.chat_template, dict) else found["default"]


def chat_tokens(tokenizer: Any, turns: Sequence[Mapping[str, Any]], **words: Any) -> list[int]:
    """Chat turns {"role", "content"} in the tokenizer's template, with the head of an answer; an assistant's last turn
    goes on instead. `words`: for the template, like `tools`, the schemas of what may be called. Raises InputError."""
    if tokenizer.chat_template is None and "chat_template" not in words:
        raise InputError("the prompts are chat turns, but the tokenizer has no chat template; use text prompts")
    end = "continue_final_message" if turns[-1]["role"] == "assistant" else "add_generation_prompt"
    try:
        with _time_limit(TEMPLATE_SECONDS):
            text = tokenizer.apply_chat_template(turns, tokenize=False, **{end: True}, **words)
    except Exception as error:  # a template may refuse turns in any way
        raise InputError(f"the tokenizer's chat template refuses the turns ({shortened(error)})") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def tool_schema(function: Callable[..., Any], hidden: str, where: str) -> dict[str, Any]:
    """What a chat template is told of a tool, but for its parameter `hidden`. Raises InputError naming `where`."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema = get_json_schema(function)
    except Exception as error:  # for want of types or a docstring
        fix = "give every parameter a type and a line in the docstring's Args section"
        raise InputError(f"{where}: {' '.join(str(error).split())[:200]}; {fix}") from None
    parameters = schema["function"]["parameters"]
    parameters["properties"].pop(hidden, None)
    if hidden in parameters.get("required", ()):
        parameters["required"].remove(hidden)
    return schema


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block when this process has computed for so long; in the main thread alone."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():  # signals are not for others
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def resolve_tokens(
    rollout: RolloutConfig,
    paths: Mapping[Role, Path],
    specs: Mapping[Role, ModelSpec],
    tokenizer: Any | None,
    required: bool,
) -> tuple[dict[Role, ModelSpec], tuple[str, ...]]:
    """`specs` with the actor's end tokens as `with_end_tokens` and what people should know; models must fit together.

    `tokenizer`: of the actor; None where it has no files. Raises InputError as the two functions below.
    """
    notes, actor = check_tokenizers(tokenizer, paths, specs, required), specs[POLICY]
    if tokenizer is not None:
        actor, warnings = with_end_tokens(actor, tokenizer, rollout)
        notes += warnings
    return {**specs, POLICY: actor}, notes


def check_tokenizers(
    actor: Any | None, paths: Mapping[Role, Path], specs: Mapping[Role, ModelSpec], required: bool
) -> tuple[str, ...]:
    """Hold the models' tokenizers against the `actor`'s (None: it has no files). Returns what people should know.

    Without tokenizer files the sizes of the vocabularies must be equal. Raises InputError for a model that does not
    fit, and with `required` for one without tokenizer files.
    """
    checked, unread = {paths[POLICY]}, []
    for role in sorted(paths, key=lambda role: len(role.starts_from)):  # what others default to first
        path, spec = paths[role], specs[role]
        if path in checked:
            continue
        checked.add(path)
        if actor is not None and has_tokenizer(path):
            if difference := first_difference(actor, load_tokenizer(path, spec)):
                raise InputError(f"{role}.path={path} has another tokenizer than the actor: {difference}; {_FIX}")
            continue
        if required:
            raise InputError(f"{role}.path={path} has no tokenizer files to hold against the actor's; copy them there")
        if spec.vocab != (vocab := specs[POLICY].vocab):
            why = "their tokenizers, which would say whether they fit, are not there"
            raise InputError(
                f"{role}.path={path}: vocab({spec.vocab}) != vocab({vocab}) of the actor, and {why}; {_FIX}"
            )
        unread.append(str(role))
    if not unread:
        return ()
    told = f"without tokenizer files actor and {', '.join(unread)} are compared by the size of their vocabularies alone"
    return (f"{told}, {specs[POLICY].vocab} each; a run needs the files",)


def first_difference(actor: Any, other: Any) -> str:
    """The first token of the `actor`'s tokenizer, by id, that is another one in `other`; '' where there is none."""
    theirs = other.get_vocab()
    named = {number: token for token, number in theirs.items()}
    for token, number in sorted(actor.get_vocab().items(), key=itemgetter(1)):
        if theirs.get(token) != number:
            there = repr(named[number]) if number in named else "none"
            return f"token {number} is {token!r} in the actor's and {there} in its"
    for name in SPECIAL:
        mine, its = getattr(actor, name), getattr(other, name)
        if mine is not None and its is not None and mine != its:
            return f"{name} is {mine!r} in the actor's and {its!r} in its"
    return ""


def with_end_tokens(actor: ModelSpec, tokenizer: Any, rollout: RolloutConfig) -> tuple[ModelSpec, tuple[str, ...]]:
    """`actor` with the tokenizer's end token where its own files name none, and what people should know.

    Raises InputError where nothing but its length would end a response, unless that is asked for.
    """
    own = tokenizer.eos_token_id
    ends = actor.eos_token_ids or (() if own is None else (own,))
    settled = replace(actor, eos_token_ids=ends)
    if rollout.ignore_eos:
        return settled, ()
    if not (ends or rollout.stop_token_ids or rollout.stop):
        why = "neither generation_config.json nor config.json of actor.path nor its tokenizer names an end token"
        raise InputError(f"{why}: set rollout.stop_token_ids or rollout.stop, or rollout.ignore_eos=true")
    if own is None or own in (*ends, *rollout.stop_token_ids):
        return settled, ()
    told = f"the tokenizer's end token {tokenizer.eos_token!r} ({own}) ends no response, the model's files name"
    return settled, (f"warning: {told} {', '.join(map(str, ends))}: set rollout.stop_token_ids=[{own}] if it should",)
