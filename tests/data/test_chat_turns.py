"""Turns with calls in the marks of model families, with a byte-level tokenizer that is trained on the spot.

Prompt, sampled turn and what is observed behind it are together what the template writes of the whole.
"""

import json
from pathlib import Path

import pytest

from rlhfuse.base.errors import InputError
from rlhfuse.data.chat_turns import ChatTurns
from rlhfuse.models.tokenizer import tool_schema

TEMPLATES = Path(__file__).parent / "chat_templates"
IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
PAIRS = r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
GLM = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>(?P<name>\w+)\n",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": PAIRS},
            "transform": NAMED,
        },
        "content": {"close_pattern": r"\s*<\|observation\|>", "content": "text"},
    },
}
OSS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"(?:<\|start\|>assistant)? to=functions\.(?P<name>\w+)"
            r"<\|channel\|>commentary json<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": NAMED,
        },
        "content": {"content": "text"},
    },
}
OTHER_ENDS = ("<|endoftext|>", "<|user|>", "<|return|>")  # of a response, not of a turn with calls
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {  # special tokens, the one that ends a turn with calls, format or response template, calls in a turn
    "qwen2_5": (IM, "<|im_end|>", "hermes", 2),
    "qwen3": (IM, "<|im_end|>", "hermes", 2),
    "qwen3_5": (IM, "<|im_end|>", "qwen3_coder", 2),
    "nemotron3": (IM, "<|im_end|>", "qwen3_coder", 2),
    "llama3": (LLAMA, "<|eot_id|>", "llama3_json", 1),
    "glm4": (
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|observation|>",
        GLM,
        2,
    ),
    "gpt_oss": (("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), "<|call|>", OSS, 1),
    "deepseek_v3": (("<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>"), "<|eos|>", "hermes", 2),
}


def add(a: int, note: str = "") -> int:
    """
    Adds one.

    Args:
        a: a number
        note: said with it
    """
    return a + 1


SCHEMA = tool_schema(add, "call", "here")


def tokenizer_of(name, special, response=None):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*special], initial_alphabet=alphabet)
    text = (TEMPLATES / f"{name}.jinja").read_text()
    made.train_from_iterator([text, json.dumps(SCHEMA)] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=[*special])
    fast.chat_template = text
    if response:
        fast.response_template = response
    return fast


def turns_of(name, special, end, written, most):
    own = written if isinstance(written, dict) else None
    tokenizer = tokenizer_of(name, special, own)
    number = tokenizer.convert_tokens_to_ids(end)
    others = [tokenizer.convert_tokens_to_ids(one) for one in special if one != end and one in OTHER_ENDS]
    made = ChatTurns(tokenizer, [SCHEMA], "hermes" if own else written, [number, *others], most)
    return made, tokenizer, number


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return (*turns_of(request.param, *FAMILIES[request.param]), FAMILIES[request.param][3], request.param)


def conversation(name, values, answers):
    calls = [{"name": "add", "arguments": {"a": value, "note": "so"}} for value in values]
    if name == "deepseek_v3":
        calls = [call | {"arguments": json.dumps(call["arguments"])} for call in calls]
    assistant = {"role": "assistant", "content": "", "reasoning_content": "well"}
    assistant |= {"tool_calls": [{"type": "function", "id": "1", "function": call} for call in calls]}
    asked = [{"role": "user", "content": "one more than 4"}]
    return asked, [*asked, assistant, *({"role": "tool", "name": "add", "content": text} for text in answers)]


@pytest.mark.parametrize("count", [1, 2])
def test_prompt_turn_and_observation_are_the_whole(family, count):
    turns, tokenizer, end, most, name = family
    if count > most:
        with pytest.raises(InputError, match=r"refuses .* turns with tools .*, 2 calls in a turn"):
            turns_of(name, *FAMILIES[name][:3], 2)
        return
    answers = ["5", 'one "more"\nis ünïcode'][:count]
    asked, all_turns = conversation(name, [4, 7][:count], answers)
    rendered = dict(tools=[SCHEMA], add_generation_prompt=True, tokenize=False)
    prompt, whole = (tokenizer.apply_chat_template(part, **rendered) for part in (asked, all_turns))
    assert whole.startswith(prompt) and turns.ends == {end}
    mark = tokenizer.decode([end])
    last = whole.index(
        mark, max(whole.index('"4"' if '"4"' in whole[len(prompt) :] else "4", len(prompt)), len(prompt))
    )
    for _ in range(count - 1):
        last = whole.index(mark, whole.index("7", len(prompt)))
    turn = tokenizer(whole[len(prompt) : last + len(mark)], add_special_tokens=False)["input_ids"]
    calls = turns.asked(turn)
    assert [(call.tool, call.fault) for call in calls] == [("add", "")] * count
    assert [call.arguments for call in calls] == [{"a": value, "note": "so"} for value in [4, 7][:count]]
    observed = turns.observation(end, ["add"] * count, answers)
    assert prompt + tokenizer.decode(turn) + tokenizer.decode(observed) == whole
    [assistant, *tools, _] = turns.messages([turn, [5]], [[("add", answer) for answer in answers]])
    assert [call["function"]["arguments"]["note"] for call in assistant["tool_calls"]] == ["so"] * count
    assert "note" not in assistant["content"], "what tool_calls has is not said twice"
    assert tools == [{"role": "tool", "name": "add", "content": answer} for answer in answers]
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert ids[len(ids) - len(observed) :] == list(observed) and ids[len(ids) - len(observed) - 1] == end


def test_what_is_no_call(family):
    turns, tokenizer, end, _, name = family
    for text in ("the answer is 5", ""):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert turns.asked([*ids, end]) == [] and turns.asked(ids) == []
    if name in ("qwen2_5", "qwen3"):
        for text, fault in (
            ('<tool_call>{"name": "add", </tool_call>', "Error: a call is malformed"),
            ('<tool_call>{"arguments": {}}</tool_call>', "Error: a call needs a name"),
            ("<tool_call>[1, 2]</tool_call>", "Error: a call needs a name"),
            ("<tool_call>" + "[" * 100_000 + "</tool_call>", "Error: a call is malformed"),
        ):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            [call] = turns.asked([*ids, end])
            assert call.fault.startswith(fault)
        ids = tokenizer('<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>', add_special_tokens=False)
        [call] = turns.asked([*ids["input_ids"], end])
        assert (call.tool, call.arguments, call.fault) == ("add", {"a": 4}, "")


def test_marks_in_an_answer_are_text(family):
    turns, tokenizer, end, _, name = family
    mark = tokenizer.decode([end])
    plain, marked = turns.observation(end, ["add"], ["x"]), turns.observation(end, ["add"], [f"a{mark}\ue000b\ud800"])
    assert marked.count(end) == plain.count(end)
    assert f"a{mark}b?" in tokenizer.decode(marked)


def test_long_answers_are_cut_to_tokens(family):
    turns, tokenizer, *_ = family
    answer = "".join(f"{n}," for n in range(200))
    for side, first, last in (("left", True, False), ("middle", True, True), ("right", False, True)):
        cut = turns.shortened(answer, 40, side)
        assert cut.startswith("0,1,2,") == first and cut.endswith(",198,199,") == last
        left, right = cut.split("...(truncated)...")
        assert sum(len(tokenizer(part)["input_ids"]) for part in (left, right)) <= 41
    assert turns.shortened("1,2", 40, "left") == "1,2"
    assert "\ufffd" not in turns.shortened("ü" * 100, 21, "middle")

    for most in range(1, 40):
        for text in (answer, "ü" * 100, "a b  c " * 50, "<|im_end|>" * 20):
            for side in ("left", "middle", "right"):
                cut = turns.shortened(text, most, side)
                assert len(turns._as_text(cut)) <= most and turns.shortened(cut, most, side) == cut


GOOD = '<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'
MADE = ("add", {"a": 4}, False)
BROKEN = {  # a call, and the tool under whose name its fault is told
    '<tool_call>{"name": "sub", </tool_call>': "sub",
    '<tool_call>{"name": "sub", "arguments": "{x"}</tool_call>': "sub",
    "<tool_call>null</tool_call>": "unknown",
    "<tool_call>[1, 2]</tool_call>": "unknown",
    "<tool_call></tool_call>": "unknown",
    '<tool_call>{"arguments": {}}</tool_call>': "unknown",
    "<tool_call>" + "[" * 3000 + "</tool_call>": "unknown",
}


@pytest.mark.parametrize("where", ["before", "behind", "between", "thought"])
@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_good_call_beside_a_broken_one_is_made(broken, where):
    turns, tokenizer, end = turns_of("qwen3", *FAMILIES["qwen3"][:3], 2)
    fault = BROKEN[broken], {}, True
    text, calls = {
        "before": (GOOD + broken, [MADE, fault]),
        "behind": (f"so\n{broken}\n{GOOD}", [fault, MADE]),
        "between": (GOOD + broken + GOOD, [MADE, fault, MADE]),
        "thought": (f"<think>{GOOD}</think>" + broken + GOOD, [fault, MADE]),
    }[where]
    turn = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    assert [(call.tool, call.arguments, bool(call.fault)) for call in turns.asked(turn)] == calls
    names = [tool for tool, *_ in calls]
    assert f"<tool_response>\n{len(names)}\n" in tokenizer.decode(
        turns.observation(end, names, [str(n + 1) for n in range(len(names))])
    )
    [assistant, *tools, last] = turns.messages([turn, [5]], [[(name, "1") for name in names]])
    made = {"type": "function", "function": {"name": "add", "arguments": {"a": 4}}}
    assert assistant["tool_calls"] == [made] * calls.count(MADE)
    assert assistant["content"].count(GOOD) == (where == "thought" and "<think>" in assistant["content"])
    assert tools == [{"role": "tool", "name": name, "content": "1"} for name in names]
    assert last == {"role": "assistant", "content": tokenizer.decode([5])}


@pytest.mark.parametrize(
    "name, message",
    [
        ("phi3", "it does not write the calls of a turn"),
        ("cohere", "refuses 3 turns with tools .*roles must alternate"),
        ("counting", "it is not append-only"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_by_name(name, message):
    with pytest.raises(InputError, match=message) as caught:
        turns_of(name, ("<|end|>",), "<|end|>", "hermes", 1)
    assert str(caught.value).startswith("the chat template cannot be used with tools: ") and "\n" not in str(
        caught.value
    )


def test_what_a_run_may_lack():
    tokenizer = tokenizer_of("qwen3", IM)
    with pytest.raises(InputError, match="ends with no token that ends a response .'<.endoftext.>'.*stop_token_ids"):
        ChatTurns(tokenizer, [SCHEMA], "hermes", [tokenizer.convert_tokens_to_ids("<|endoftext|>")], 1)
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        ChatTurns(tokenizer, [SCHEMA], "hermes", [1], 1)
