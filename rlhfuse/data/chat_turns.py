"""How a tokenizer's chat template writes calls of tools and, behind a turn, what they answered.

Observed tokens are the rendering of the answers behind the token that ended the turn: what was sampled stays as it is,
and nothing is tokenized twice. That this is what the template would have written is compared exactly at the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from os.path import commonprefix
from typing import Any

from rlhfuse.base.errors import InputError

_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_ANCHOR = r"\A|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"


def _format(**tool_calls: Any) -> dict[str, Any]:
    """A response template, of transformers; without the token that ends the turn."""
    fields = {"reasoning_content": _THINK, "tool_calls": tool_calls | {"repeats": True}, "content": {"content": "text"}}
    return {"defaults": {"role": "assistant"}, "start_anchor_pattern": _ANCHOR, "fields": fields}


FORMATS = {
    "hermes": _format(
        open_pattern=r"\s*<tool_call>",
        close="</tool_call>",
        content="json",
        transform={"type": "function", "function": "{content}"},
    ),
    "qwen3_coder": _format(
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        transform=_NAMED,
    ),
    "llama3_json": _format(
        open_pattern=r'\s*(?:<\|python_tag\|>)?\{"name":\s*"(?P<name>[^"]+)",\s*"(?:parameters|arguments)":\s*(?=\{)',
        close_pattern=r"\}\s*(?:;|\Z)",
        content="json",
        transform=_NAMED,
    ),
}
Schema = Mapping[str, Any]  # of a tool
_USER = {"role": "user", "content": "u"}
_AS_TEXT = "\ue000", "\ue001"  # around what looks like a special token in an answer and is to be text
_CUT = "...(truncated)..."


@dataclass(frozen=True)
class AskedCall:
    """A call that a turn asks for. `fault`: why it cannot be read; the model is told."""

    tool: str
    arguments: Any
    fault: str = ""


class ChatTurns:
    """Turns of a tokenizer's chat template with `schemas` of tools. Owns nothing that changes."""

    def __init__(
        self, tokenizer: Any, schemas: Sequence[Schema], format: str, end_ids: Collection[int], most: int, **words: Any
    ) -> None:
        """`end_ids`: tokens that end a turn; `most`: answers behind one; `words`: for the template. Raises InputError
        for one that drops calls or answers, refuses `most` of them, or writes otherwise what came before."""
        if tokenizer.chat_template is None:
            raise InputError("rollout.multi_turn.enable=true: the tokenizer has no chat template, which writes calls")
        self._tokenizer, self._schemas = tokenizer, [dict(schema) for schema in schemas]
        self._words = words
        self._names = [schema["function"]["name"] for schema in schemas]
        self._own = getattr(tokenizer, "response_template", None)
        self._template = self._own or FORMATS[format]
        added = tokenizer.added_tokens_decoder.values()
        special = sorted((str(token) for token in added if token.special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")
        self._end_ids = {number: tokenizer.decode([number], skip_special_tokens=False) for number in end_ids}
        self._assistant = {}, "dict"  # further keys of an assistant's turn, and how it holds arguments
        self._head = self._render([_USER], head=True)[len(self._render([_USER])) :]
        self._assistant = self._find_assistant(most)
        ends = [number for number in self._end_ids if self._is_end(number, most)]
        if not ends:
            named = ", ".join(map(repr, self._end_ids.values())) or "none"
            why = "a turn with calls ends with no token that ends a response"
            raise InputError(f"the chat template: {why} ({named}); set rollout.stop_token_ids")
        self.ends = frozenset(ends)

    def asked(self, turn: Sequence[int]) -> list[AskedCall]:
        """The calls of a turn, its drawn tokens; none where it has none, or did not end as a turn with calls does."""
        if not turn or turn[-1] not in self.ends:
            return []
        text = self._tokenizer.decode(list(turn if self._own else turn[:-1]), skip_special_tokens=False)
        try:
            message = self._tokenizer.parse_response(text, self._template, prefix=self._head, tools=self._schemas)
            return [_asked(call) for call in message.get("tool_calls") or []]
        except Exception as error:  # whatever a model writes
            fault = f"Error: a call is malformed ({' '.join(str(error).split())[:120]})"
            return [AskedCall(self._names[0], {}, fault)]

    def observation(self, ended: int, tools: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """What the model observes behind a turn that the token `ended` ended: answers, and the head of a new turn."""
        texts = [self._marked(answer) for answer in answers]
        tools = [tool if tool in self._names else self._names[0] for tool in tools]
        whole, at = self._behind(self._end_ids[ended], tools, texts)
        return tuple(self._encoded(whole[at:]))

    def shortened(self, answer: str, most: int, side: str) -> str:
        """An answer of at most `most` tokens: its left or right part, or both ends (middle), with a mark of the cut."""
        ids = self._as_text(answer)
        if len(ids) <= most:
            return answer
        left = {"left": most, "middle": most // 2, "right": 0}[side]
        first, last = (self._tokenizer.decode(part) for part in (ids[:left], ids[len(ids) - (most - left) :]))
        return first.strip("\ufffd") + _CUT + last.strip("\ufffd")

    def messages(self, pieces: Sequence[tuple[Sequence[int], bool]]) -> list[dict[str, Any]]:
        """Chat turns of a response's runs of tokens (drawn or not), as TRL gives them to a reward function."""
        found: list[dict[str, Any]] = []
        for tokens, drawn in pieces:
            text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
            turn: dict[str, Any] = {
                "role": "assistant" if drawn else "tool",
                "content": text if drawn else text.strip(),
            }
            if drawn and (calls := self.asked(tokens)):
                functions = [{"name": call.tool, "arguments": call.arguments} for call in calls]
                turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
            found.append(turn)
        return found

    # how the template writes -----------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Mapping[str, Any]], head: bool = False) -> str:
        made = dict(tools=self._schemas, add_generation_prompt=head, tokenize=False, **self._words)
        try:
            return self._tokenizer.apply_chat_template(list(messages), **made)
        except Exception as error:  # a template may refuse in any way
            raise InputError(f"the chat template refuses {len(messages)} turns with tools ({error})") from None

    def _turns(self, tools: Sequence[str], answers: Sequence[str]) -> list[dict[str, Any]]:
        """A user's turn, an assistant's with calls of these tools, and their answers."""
        further, held = self._assistant
        arguments: Any = {"a": "sentinel"}
        arguments = arguments if held == "dict" else json.dumps(arguments)
        calls = [
            {"id": f"call{i:05d}", "type": "function", "function": {"name": tool, "arguments": arguments}}
            for i, tool in enumerate(tools)
        ]
        named = zip(calls, tools, answers)
        said = [{"role": "tool", "tool_call_id": c["id"], "name": tool, "content": text} for c, tool, text in named]
        return [_USER, {"role": "assistant", "content": "", "tool_calls": calls, **further}, *said]

    def _behind(self, end: str, tools: Sequence[str], answers: Sequence[str]) -> tuple[str, int]:
        """All turns, and where in them what follows the end of the assistant's begins; -1: it does not end so."""
        turns = self._turns(tools, answers)
        before, whole = self._render(turns[:2]), self._render(turns, head=True)
        own = len(commonprefix((self._render([_USER]), before)))
        if (at := before.rfind(end, own)) >= 0:
            return whole, at + len(end)
        return whole, len(before) + len(end) if whole.startswith(end, len(before)) else -1

    def _find_assistant(self, most: int) -> tuple[dict[str, Any], str]:
        """How an assistant's turn with calls has to be given, so that nothing of it is lost or written otherwise."""
        why: list[str] = []
        for further, held in product(({}, {"reasoning_content": "r"}), ("dict", "text")):
            self._assistant = further, held
            faults = [fault for count in {1, most} for fault in self._faults(count)]
            if not faults:
                return further, held
            why += faults
        raise InputError(f"the chat template cannot be used with tools: {why[0]}; take another, or call one at a time")

    def _faults(self, count: int) -> Iterator[str]:
        tools, answers = [self._names[0]] * count, [f"answer{i}sentinel" for i in range(count)]
        try:
            turns = self._turns(tools, answers)
            user, before, whole = self._render([_USER]), self._render(turns[:2]), self._render(turns, head=True)
        except InputError as error:
            yield str(error) + (f", {count} calls in a turn" if count > 1 else "")
            return
        written = before[len(commonprefix((user, before))) :]
        if written.count(self._names[0]) < count or written.count("sentinel") < count:
            yield "it does not write the calls of a turn"
        if not whole.startswith(before):
            yield "it is not append-only: it writes a turn otherwise when others follow"
        if [whole[len(before) :].count(answer) for answer in answers] != [1] * count:
            yield "it does not write the answers of tools"

    def _is_end(self, number: int, most: int) -> bool:
        """Whether a turn with calls ends with this token, and all of its rendering is that of its two parts."""
        ok = True
        for count in {1, most}:
            tools, answers = [self._names[0]] * count, ["1"] * count
            whole, at = self._behind(self._end_ids[number], tools, answers)
            if at < 0:
                return False
            first, last = self._encoded(whole[:at]), self._encoded(whole[at:])
            ok = ok and first[-1] == number and first + last == self._encoded(whole)
        if not ok:
            raise InputError(
                f"the tokenizer reads a turn and what follows {self._end_ids[number]!r} otherwise together"
            )
        return True

    def _marked(self, answer: str) -> str:
        """An answer in which what looks like a special token stands between marks."""
        clean = answer.encode(errors="replace").decode().translate(dict.fromkeys(map(ord, _AS_TEXT)))
        return self._special.sub(lambda found: f"{_AS_TEXT[0]}{found[0]}{_AS_TEXT[1]}", clean)

    def _encoded(self, text: str) -> list[int]:
        pieces = re.split(f"[{''.join(_AS_TEXT)}]", text)
        parts = [self._as_text(piece) if i % 2 else self._ids(piece) for i, piece in enumerate(pieces)]
        return [number for part in parts for number in part]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _as_text(self, text: str) -> list[int]:
        """Ids of a text in which no special token is one."""
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def _asked(call: Any) -> AskedCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        return AskedCall("", {}, "Error: a call needs a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return AskedCall(name, arguments)
