"""How a tokenizer's chat template writes calls of tools and, behind a turn, what they answered.

Observed tokens are the rendering of the answers behind the token that ended the turn: what was sampled stays as it is,
and nothing is tokenized twice. That this is what the template would have written is compared exactly at the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
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
_UNKNOWN = "unknown"  # the name of a tool in a call that names none
_NAME = re.compile(r'"name"\s*:\s*"([\w.-]{1,64})"')
_MOST_CALLS = 32  # that are read of a turn with a broken one


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
        calls = self._template["fields"].get("tool_calls", {})
        marks = [calls["open"]] if isinstance(calls.get("open"), str) else calls.get("open", ())
        self._opens = calls.get("open_pattern") or "|".join(map(re.escape, marks)) or r"(?!)"
        self.longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
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
        return self._read(turn)[0]

    def _read(self, turn: Sequence[int]) -> tuple[list[AskedCall], dict[str, Any]]:
        """Calls of a turn, and its message without them."""
        if not turn or turn[-1] not in self.ends:
            return [], {}
        text = self._tokenizer.decode(list(turn if self._own else turn[:-1]), skip_special_tokens=False)
        try:
            return self._parsed(text)
        except Exception:  # whatever a model writes
            return self._parsed_one_by_one(text)

    def _parsed(self, text: str) -> tuple[list[AskedCall], dict[str, Any]]:
        message = self._tokenizer.parse_response(text, self._template, prefix=self._head, tools=self._schemas)
        return [_asked(call) for call in message.pop("tool_calls", None) or []], message

    def _parsed_one_by_one(self, text: str) -> tuple[list[AskedCall], dict[str, Any]]:
        """The calls of a turn with broken ones, each of which is a fault, and stays in the content."""
        starts, calls, broken = [0], [], ""
        with suppress(re.error):  # a template's expression that `re` does not know
            starts = [found.start() for found in re.finditer(self._opens, text)][:_MOST_CALLS] or starts
        before = text[: starts[0]]
        for start, end in zip(starts, [*starts[1:], len(text)]):
            piece = text[start:end]
            try:
                found, _ = self._parsed(before + piece)
                before += "" if found else piece  # it was no call: a thought, say
            except Exception as error:
                found, broken = [_malformed(piece, error)], broken + piece
            calls += found
        return calls, {"content": before + broken}

    def observation(self, ended: int, tools: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """What the model observes behind a turn that the token `ended` ended: answers, and the head of a new turn."""
        texts = [self._marked(answer) for answer in answers]
        plain = re.compile(r"[\w.-]{1,64}").fullmatch
        tools = [tool if plain(tool) and not self._special.search(tool) else _UNKNOWN for tool in tools]
        whole, at = self._behind(self._end_ids[ended], tools, texts)
        return tuple(self._encoded(whole[at:]))

    def shortened(self, answer: str, most: int, side: str) -> str:
        """An answer of at most `most` tokens: its left or right part, or both ends (middle), with a mark of the cut
        where that leaves room."""
        ids, mark, cut = self._as_text(answer), len(self._as_text(_CUT)), answer
        room, over = most - mark if mark < most else most, len(ids) - most
        while over > 0 and room >= 0:
            left = {"left": room, "middle": room // 2, "right": 0}[side]
            first, last = (self._tokenizer.decode(part) for part in (ids[:left], ids[len(ids) - (room - left) :]))
            cut = first.strip("\ufffd") + (_CUT if mark < most else "") + last.strip("\ufffd")
            over = len(self._as_text(cut)) - most
            room -= max(over, 1)
        return cut

    def messages(
        self, drawn: Sequence[Sequence[int]], said: Sequence[Sequence[tuple[str, str]]]
    ) -> list[dict[str, Any]]:
        """Chat turns of a response, as TRL gives them to a reward function: each drawn turn, and behind it a turn for
        each of its answers, (tool, text)."""
        found: list[dict[str, Any]] = []
        for number, tokens in enumerate(drawn):
            calls, message = self._read(tokens)
            if functions := [{"name": call.tool, "arguments": call.arguments} for call in calls if not call.fault]:
                written = [{"type": "function", "function": function} for function in functions]
                found.append({"role": "assistant", "content": "", **message, "tool_calls": written})
            else:
                text = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
                found.append({"role": "assistant", "content": text})
            if number < len(drawn) - 1:
                found += [{"role": "tool", "name": tool, "content": text} for tool, text in said[number]]
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


def _malformed(text: str, error: Exception) -> AskedCall:
    named = _NAME.search(text)
    fault = f"Error: a call is malformed ({' '.join(str(error).split())[:120]})"
    return AskedCall(named[1] if named else _UNKNOWN, {}, fault)


def _asked(call: Any) -> AskedCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        return AskedCall(_UNKNOWN, {}, "Error: a call needs a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return AskedCall(name, {}, _malformed("", error).fault)
    return AskedCall(name, arguments)
