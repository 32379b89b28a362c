"""Prompt files in every format, every refusal with its place and fix, and draws that need no saved position."""

import gzip
import itertools
import json
import math
from collections import Counter
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.paths import shared_data
from testkit.profiles import examples

from rlhfuse.base.errors import InputError
from rlhfuse.data.prompts import load_prompts, prompts_from

TURNS = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def encode(text):
    """One token per character; chat turns are joined."""
    plain = text if isinstance(text, str) else "".join(turn["content"] for turn in text)
    return [ord(character) for character in plain]


def load(*files, key="prompt", longest=100, **kwargs):
    return load_prompts(files, key, encode, longest, **kwargs)


def write(folder, name, content):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def write_parquet(folder, rows, arrow=None):
    """As p.parquet; with `arrow` "file" or "stream" as such a p.arrow."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_struct_array(pyarrow.array(rows))
    if arrow is None:
        pyarrow.parquet.write_table(table, folder / "p.parquet")
        return folder / "p.parquet"
    with getattr(pyarrow.ipc, f"new_{arrow}")(str(folder / f"{arrow}.arrow"), table.schema) as out:
        out.write_table(table)
    return folder / f"{arrow}.arrow"


def test_every_format_gives_the_same_prompts(tmp_path):
    rows = [{"prompt": "one, two", "answer": "3"}, {"prompt": 'say "é"', "answer": "4"}]
    lines = "\r\n\n".join(json.dumps(row) for row in rows)  # an empty line is no row
    files = [
        write(tmp_path, "p.jsonl", lines),
        write(tmp_path, "bom.jsonl", b"\xef\xbb\xbf" + lines.encode()),
        write(tmp_path, "p.jsonl.gz", gzip.compress(lines.encode(), mtime=0)),
        write(tmp_path, "p.JSON", json.dumps(rows)),
        write(tmp_path, "p.csv", 'prompt,answer\n"one, two",3\r\n"say ""é""",4\n'),
        write_parquet(tmp_path, rows),
    ]
    for file in files:
        prompts = load(file)
        assert [list(prompt.tokens) for prompt in prompts] == [encode(row["prompt"]) for row in rows], file
        assert [prompt.row for prompt in prompts] == rows
    assert load(files[0])[1].where.endswith("p.jsonl:3")
    assert len(load(*files)) == 12


GOOD = '{"prompt": "x"}\n'
SPOILT = gzip.compress(GOOD.encode() * 999, mtime=0)[:12] + b"\xff" * 30


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.jsonl", "", "holds no rows"),
        ("p.json", "", "holds no rows"),
        ("p.csv", "prompt\n", "holds no rows"),
        ("p.jsonl", GOOD + '{"prompt": "x"', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", GOOD + "[1]", "p.jsonl:2: a row must be an object"),
        ("p.jsonl", '{"question": 1, "a": 1}', "no key 'prompt'; found 'question', 'a': set data.prompt_key"),
        ("p.jsonl", '{"prompt": ""}', "p.jsonl:1: prompt is ''; it must be a non-empty text"),
        ("p.jsonl", '{"prompt": null}', "must be a non-empty text"),
        ("p.jsonl", '{"prompt": ["turn one", "turn two"]}', '"role": "user"'),
        ("p.jsonl", '{"prompt": []}', "must be a non-empty text"),
        ("p.jsonl", GOOD.encode() + b'{"prompt": "\xe9"}', "p.jsonl:2: not UTF-8 .byte 0xe9 at 12."),
        ("p.jsonl", "[" * 100000, "p.jsonl:1: JSON nested more than 100 deep"),
        ("p.jsonl.gz", b"no gzip", "not a whole gzip file"),
        ("p.jsonl.gz", gzip.compress(GOOD.encode() * 999, mtime=0)[:-9], "not a whole gzip file"),
        ("p.json", '{"prompt": "x"}', "must be a list of rows; for one object per line name it .jsonl"),
        ("p.json", '[\n{"prompt": "x"},\n{"prompt" "y"}]', "p.json:3: not valid JSON .Expecting ':'"),
        ("p.jsonl", '{"chosen": "no turns", "rejected": ""}', "p.jsonl:1: chosen is 'no turns'; it must be a dialogue"),
        ("p.jsonl", '{"chosen": "\\n\\nAssistant: hi"}', "it must be a dialogue of Human: and Assistant: turns"),
        ("p.jsonl", '{"chosen": null}', "p.jsonl:1: chosen is 'None'"),
        ("p.csv", 'prompt,answer\na,b\n"x\n', "p.csv:3: not valid CSV"),
        ("p.csv", "prompt,answer\na\n", "p.csv:2: not 2 fields as in the header"),
        ("p.parquet", "no parquet", "not a readable parquet file"),
        ("p.csv", "", "holds no rows"),
        ("p.csv", "prompt,answer\na,b\na,b,c\n", "p.csv:3: not 2 fields as in the header"),
        ("p.csv", "question,answer\na,b\n", "p.csv:2: no key 'prompt'; found 'question', 'answer': set"),
        ("p.csv", b"prompt\na\n\xe9\n", "p.csv:3: not UTF-8 .byte 0xe9 at 0."),
        ("p.csv", "prompt,answer\n,b\n", "p.csv:2: prompt is ''; it must be a non-empty text"),
        ("p.json", b'[{"prompt": "x"},\n {"prompt": "\xe9"}]', "p.json:2: not UTF-8 .byte 0xe9 at 13."),
        ("p.json", "[3]", "p.json:1: a row must be an object"),
        ("p.jsonl", GOOD + '{"prompt": ' + "9" * 5000 + "}", "p.jsonl:2: not valid JSON .Exceeds the limit"),
        ("p.jsonl", r'{"prompt": "half \ud83d"}', "p.jsonl:1: prompt has half a character"),
        ("p.jsonl", '{"prompt": " \\n "}', "must be a non-empty text"),
        ("p.jsonl", '{"prompt": [{"role": "user", "content": ""}]}', "must be a non-empty text"),
        ("p.jsonl", '{"prompt": [{"role": "user"}]}', "must be a non-empty text or a list of"),
        ("p.jsonl", '{"prompt": [{"role": "user", "content": null}]}', "must be a non-empty text or a list of"),
        ("p.jsonl", '{"prompt": [{"content": "x", "role": 1}]}', "must be a non-empty text or a list of"),
        ("p.jsonl.gz", SPOILT, "not a whole gzip file"),
        ("p.txt", "x", "of no known kind; use one of .jsonl"),
        ("p.jsonl", json.dumps({"prompt": "x" * 101}), "101 tokens, more than data.max_prompt_tokens=100"),
    ],
)
def test_refusals_name_place_and_fix(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message) as caught:
        load(write(tmp_path, name, content))
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_file_of_prompts_is_named(tmp_path):
    file = write_parquet(tmp_path, [{"question": "q"}])
    with pytest.raises(InputError, match="p.parquet:1: no key 'prompt'; found 'question': set data.prompt_key"):
        load(file)
    with pytest.raises(InputError, match="none.jsonl does not exist; check data.train_files"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="no prompt file was given"):
        load()


DIALOGUE = "\n\nHuman: what?\n\nAssistant: this.\n\nHuman: and?\n\nAssistant: that,\n\nor that."


def test_a_dialogue_is_asked_up_to_its_last_answer(tmp_path):
    file = write(tmp_path, "p.jsonl", json.dumps({"chosen": DIALOGUE, "rejected": DIALOGUE + " No."}))
    assert load(file)[0].text == "\n\nHuman: what?\n\nAssistant: this.\n\nHuman: and?\n\nAssistant:"
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this."}]
    turns.append({"role": "user", "content": "and?"})
    assert load(file, dialogues_as_turns=True)[0].text == turns
    chat = write(tmp_path, "c.jsonl", json.dumps({"chosen": [*turns, {"role": "assistant", "content": "no"}]}))
    assert load(chat)[0].text == turns and load(chat)[0].tokens == tuple(encode(turns))
    both = write(tmp_path, "b.jsonl", json.dumps({"prompt": "asked", "chosen": DIALOGUE}))
    assert load(both)[0].text == "asked"


def test_verl_rows_keep_all_their_fields(tmp_path):
    row = {
        "data_source": "x",
        "prompt": TURNS,
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra_info": {"index": 1},
    }
    for file in (write(tmp_path, "p.json", json.dumps([row])), write_parquet(tmp_path, [row])):
        assert load(file)[0].row == row and load(file)[0].text == TURNS
        assert load(file)[0].tokens == tuple(encode("be briefhi"))


def refuse(text):
    raise InputError("no template")


@pytest.mark.parametrize("tokens, message", [(refuse, "no template"), (lambda text: [], "the prompt has no tokens")])
def test_what_encoding_refuses_is_named_by_its_line(tmp_path, tokens, message):
    with pytest.raises(InputError, match=f"p.jsonl:1: {message}"):
        load_prompts([write(tmp_path, "p.jsonl", GOOD)], "prompt", tokens, 10)


def test_long_prompts_are_dropped_and_counted_on_request(tmp_path):
    file = write(tmp_path, "p.jsonl", "\n".join(json.dumps({"prompt": "x" * n}) for n in (5, 6, 7)))
    prompts = load(file, longest=6, filter_long_prompts=True)
    assert (len(prompts), prompts.dropped) == (2, 1)
    assert str(prompts) == "2 prompts of 6 tokens in the median, 6 at most, 1 longer ones dropped"
    with pytest.raises(InputError, match="all 3 prompts are longer than data.max_prompt_tokens=4"):
        load(file, longest=4, filter_long_prompts=True)


def test_real_files_load():
    folder = shared_data("prompts")
    assert len(load(folder / "gsm8k_train.jsonl", key="question", longest=10**6)) == 7473
    dialogues = folder / "hh_harmless_base_test.jsonl.gz"
    asked = load(dialogues, longest=10**6)
    assert len(load(dialogues, key="chosen", longest=10**6)) == len(asked) == 2312
    assert all(prompt.text.endswith("\n\nAssistant:") for prompt in asked.prompts)


@examples(60)
@given(prompts=st.integers(1, 20), count=st.integers(1, 50), seed=st.integers(-5, 5))
def test_draws_are_shuffled_epochs(prompts, count, seed):
    """The iterations laid end to end are whole permutations; an iteration needs none before it."""
    drawn = [prompts_from(prompts, seed, iteration * count, count) for iteration in reversed(range(6))]
    stream = list(itertools.chain(*reversed(drawn)))
    assert all(len(one) == count for one in drawn)
    assert stream == prompts_from(prompts, seed, 0, 6 * count)
    for start in range(0, len(stream) - prompts + 1, prompts):
        assert sorted(stream[start : start + prompts]) == list(range(prompts))
    assert max(Counter(stream).values()) - min(Counter(stream).values(), default=0) <= 1 or len(stream) < prompts


def test_epochs_and_seeds_differ():
    orders = [prompts_from(50, seed, first, 50) for seed, first in ((1, 0), (1, 50), (2, 0))]
    assert all(a != b for a, b in itertools.combinations(orders, 2)) and orders[0] != list(range(50))


SCALARS = st.one_of(st.none(), st.text("ab é", max_size=4))
RECORDS = st.fixed_dictionaries({"n": SCALARS}, optional={"a-b": SCALARS, "class": st.none() | st.integers(-9, 9)})
CALLS = [{"type": "function", "function": {"name": "calc", "arguments": {"a": 1}}}]
OTHERS = [{"function": {"name": "look", "arguments": {"city": "X"}}}]
ASKED = [{"role": "assistant", "tool_calls": calls} for calls in (CALLS, OTHERS)]
ASKED += [{"role": "user", "content": "hi", "name": None}, {"role": "user", "content": "x", "name": "bob"}]
BLOCKS = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
FORMS = st.text("ab é", min_size=1).filter(str.strip), st.lists(st.just(BLOCKS), min_size=1, max_size=2)
FORMS += (st.lists(st.sampled_from(ASKED), max_size=3).map(lambda turns: [*turns, TURNS[1]]),)
COLUMNS = {"extra_info": RECORDS, "at": st.dates().map(str), "list": st.lists(RECORDS, max_size=3)}
ROWS = [st.lists(st.fixed_dictionaries({"prompt": form}, optional=COLUMNS), min_size=1, max_size=4) for form in FORMS]


@examples(100)
@given(st.one_of(ROWS))
def test_the_same_rows_give_the_same_prompts_and_columns_from_every_format(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("formats")
    tables = [write_parquet(folder, rows, arrow) for arrow in (None, "file", "stream")]
    files = [write(folder, "p.jsonl", "\n".join(map(json.dumps, rows))), *tables]
    first, *others = ([(prompt.tokens, prompt.text, prompt.row) for prompt in load(file)] for file in files)
    assert all(other == first for other in others)
    assert all(row.keys() == {key for one in rows for key in one} for _, _, row in first)


def test_dates_and_numbers_that_are_none_come_as_they_are(tmp_path):
    rows = [{"prompt": "x", "score": math.nan, "at": date(2026, 1, 2)}, {"prompt": "y", "score": 1.0, "at": None}]
    for arrow in (None, "file", "stream"):
        first, second = (prompt.row for prompt in load(write_parquet(tmp_path, rows, arrow)))
        assert math.isnan(first["score"]) and first["at"] == rows[0]["at"] and second == rows[1]


def test_turns_with_calls_and_blocks_of_text_are_prompts(tmp_path):
    turns = [TURNS[1], {"role": "assistant", "content": None, "tool_calls": CALLS}, BLOCKS]
    prompt = load(write(tmp_path, "p.jsonl", json.dumps({"prompt": turns})))[0]
    assert prompt.tokens == tuple(encode("hihi")) and prompt.text[1:] == prompt.row["prompt"][1:] == [ASKED[0], BLOCKS]


@pytest.mark.parametrize("turn", [{}, {"role": 3}, {"content": "x"}, {"role": "a", "content": [{"type": "image"}]}])
def test_a_turn_that_is_none_is_named_by_its_number(tmp_path, turn):
    with pytest.raises(InputError, match="p.jsonl:1: .*turn 2"):
        load(write(tmp_path, "p.jsonl", json.dumps({"prompt": [TURNS[1], turn]})))
