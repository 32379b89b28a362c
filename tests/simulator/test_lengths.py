"""Reading lengths: every kind of file, every way to be wrong, and the percentiles."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from testkit.paths import shared_data

from rlhfuse.base.errors import InputError
from rlhfuse.simulator.lengths import RECENT_ITERATIONS, SPARED, TURNS, SampleLengths, Turn, load_lengths
from rlhfuse.tasks.group_selection import BEGUN


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_csv_columns_by_name_or_known(tmp_path):
    file = write(tmp_path / "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens,other\nx,5,7,1\ny,6,8.0,2\n")
    read = load_lengths(file)
    assert (read.lengths.prompt, read.lengths.output) == ((5, 6), (7, 8))
    assert (read.prompt_column, read.output_column) == ("ContextTokens", "GeneratedTokens")
    assert load_lengths(f"{file}:other", prompt_column="GeneratedTokens").lengths == SampleLengths((7, 8), (1, 2))


def test_jsonl_and_no_prompt_column(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"response_length": 4}\n\n{"response_length": 9}\n')
    read = load_lengths(file, default_prompt=33)
    assert read.lengths == SampleLengths((33, 33), (4, 9)) and read.prompt_column is None


def test_a_past_run(tmp_path):
    rows = [
        {"iteration": 1, "lengths/prompt": [3, 4], "lengths/output": [10, 20], "critic/score/mean": 0.5},
        {"event": "restart"},
        {"iteration": 2, "lengths/prompt": [5], "lengths/output": [30]},
    ]
    file = write(tmp_path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert load_lengths(file).lengths == SampleLengths((3, 4, 5), (10, 20, 30))


def test_parquet(tmp_path):
    table = pyarrow.table({"prompt_tokens": [1, 2], "output_tokens": [3, 4]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert load_lengths(tmp_path / "a.parquet").lengths == SampleLengths((1, 2), (3, 4))


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.csv", "x,y\n1,2\n", "no known column of output lengths; name it as FILE:COLUMN; found: x, y"),
        ("a.csv", "output_length\n4\n-3\n", ":3: output_length is -3; at least 1"),
        ("a.csv", "output_length\n4\nmany\n", ":3: output_length is 'many'; a whole number"),
        ("a.csv", "output_length\n4.5\n", ":2: output_length is '4.5'"),
        ("a.csv", "output_length\n0\n", "at least 1"),
        ("a.csv", "output_length\n", "no row"),
        ("a.csv", "output_length,prompt_length\n4,-1\n", "prompt_length is -1; at least 0"),
        ("a.jsonl", "[4]\n", ":1: an object is needed"),
        ("a.jsonl", '{"output_length": true}\n', ":1: output_length is True"),
        ("a.jsonl", '{"lengths/output": [4, 5], "lengths/prompt": [1]}\n', "1 values of lengths/prompt but 2"),
        ("a.jsonl", '{"output_length": 1e300}', "at least 1 is needed, 2147483647 at most"),
        (
            "a.jsonl",
            '{"lengths/output": [4], "lengths/turns": [[[4, 0, 0]], []]}\n',
            ":1: lengths/turns is .*1 lengths, but",
        ),
        (
            "a.jsonl",
            '{"lengths/output": [4], "lengths/turns": [[[3, 0, 0]]]}\n',
            ":1: lengths/turns is .*a response of 4 tokens",
        ),
        ("a.jsonl", '{"lengths/output": [4], "lengths/turns": [[[2, 1, 2]]]}\n', "that ends with drawn ones"),
        ("a.jsonl", '{"lengths/output": [4], "lengths/turns": [[[2, -1, 1], [1, 0, 0]]]}\n', "a pause of -1 s"),
        ("a.jsonl", '{"lengths/output": [4], "lengths/turns": [[[4, 0]]]}\n', ":1: lengths/turns is "),
        ("a.jsonl", '{"lengths/output": [4], "lengths/turns": 4}\n', ":1: lengths/turns is 4"),
        ("a.txt", "4\n", "of no known kind; use one of .jsonl, .jsonl.gz, .json, .csv, .parquet"),
    ],
)
def test_bad_files_name_the_place(tmp_path, name, text, message):
    with pytest.raises(InputError, match=message.replace("[", "\\[")):
        load_lengths(write(tmp_path / name, text))


def test_missing_column(tmp_path):
    file = write(tmp_path / "a.csv", "output_length\n4\n")
    with pytest.raises(InputError, match="no column 'tokens'; found: output_length"):
        load_lengths(f"{file}:tokens")
    with pytest.raises(InputError, match="no column 'p'; found"):
        load_lengths(file, prompt_column="p")


def test_percentiles_are_samples():
    lengths = SampleLengths((1,) * 1000, tuple(range(1, 1001)))
    assert lengths.percentiles() == {"p50": 500, "p90": 900, "p99": 990, "p999": 999, "max": 1000}
    assert SampleLengths((1,), (7,)).percentiles() == dict.fromkeys(("p50", "p90", "p99", "p999", "max"), 7)


def test_clipping_is_counted():
    clipped = SampleLengths((5, 50, 50), (5, 5, 500)).clip(10, 100)
    assert clipped == SampleLengths((5, 10, 10), (5, 5, 100), clipped=1, clipped_prompts=2)


def test_a_run_says_which_samples_of_its_last_iterations_have_no_gradient(tmp_path):
    rows = [{"iteration": -1, "val/samples": 3}]
    rows += [{"lengths/output": [i, 5], "lengths/prompt": [1, 2], SPARED: [i % 2, 1]} for i in range(1, 12)]
    rows += [{"lengths/output": [7, 8], "lengths/prompt": [3, 3]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = load_lengths(tmp_path)
    assert len(read.lengths) == 24 and read.lengths.spared == ()
    last = range(12 - RECENT_ITERATIONS, 12)
    assert read.recent == tuple(SampleLengths((1, 2), (i, 5), spared=(i % 2 == 1, True)) for i in last)
    every = SampleLengths.joined(read.recent)
    assert every.output == tuple(n for i in last for n in (i, 5)) and every.prompt == (1, 2) * len(last)
    assert every.trained == tuple((1, i) for i in last if i % 2 == 0)
    kept = every.clip(1, 4)
    assert kept.spared == every.spared and kept.output[1] == 4
    first, second = kept.draw(50, 2, seed=1)
    assert first != second and len(first) == len(first.spared) == 50
    for batch in (first, second):
        assert batch.trained == ((1, 4),) * 12, "a quarter is trained on, in any batch"
        assert batch.spared != tuple(sorted(batch.spared)), "in any order"
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[-1]) + "\n")
    assert load_lengths(tmp_path).recent == ()
    with pytest.raises(InputError, match="2 lengths, but 1 samples that are left out or not"):
        SampleLengths((1, 1), (1, 1), spared=(True,))


def test_draws_repeat_with_the_seed():
    lengths = SampleLengths(tuple(range(100)), tuple(range(1, 101)))
    batches = lengths.draw(20, 2, seed=3)
    assert batches == lengths.draw(20, 2, seed=3) != lengths.draw(20, 2, seed=4)
    assert batches[0] != batches[1]
    assert all(output == prompt + 1 for b in batches for prompt, output in zip(b.prompt, b.output))


def test_real_traces_have_the_published_tail():
    file = shared_data("traces") / "azure2023_conv.csv"
    marks = load_lengths(file).lengths.percentiles()
    assert (marks["p50"], marks["p999"]) == (129, 954)


def test_a_run_that_filtered_groups_says_how_many_it_began(tmp_path):
    row = {"lengths/prompt": [1], "lengths/output": [2]}
    rows = [row | {BEGUN: begun} for begun in (9.0, *(1.0, 2.0) * (RECENT_ITERATIONS // 2))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_lengths(tmp_path).begun == 1.5, "by the last iterations"
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row))
    assert load_lengths(tmp_path).begun == 1


def test_turns_belong_to_whole_samples(tmp_path):
    """In iterations without tools each response is one turn; a cut one ends with what was drawn."""
    several = [[[2, 0.5, 3], [5, 0.0, 0]], [[4, 0.0, 0]]]
    rows = [{"lengths/output": [7], "lengths/prompt": [1]}]
    rows += [{"lengths/output": [10, 4], "lengths/prompt": [2, 3], TURNS: several}]
    rows += [{"lengths/output": [8], "lengths/prompt": [4]}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = load_lengths(tmp_path).lengths
    first = Turn(2, 0.5, 3), Turn(5, 0.0, 0)
    assert lengths.turns == ((Turn(7, 0.0, 0),), first, (Turn(4, 0.0, 0),), (Turn(8, 0.0, 0),))
    assert lengths.drawn == (7, 7, 4, 8)
    (drawn,) = lengths.draw(50, 1, seed=0)
    kinds = set(zip(drawn.prompt, drawn.output, drawn.turns))
    assert kinds == set(zip(lengths.prompt, lengths.output, lengths.turns))
    for most, turns, output in (
        (6, (first[0], Turn(1, 0.0, 0)), 6),
        (5, (Turn(2, 0.0, 0),), 2),
        (1, (Turn(1, 0.0, 0),), 1),
    ):
        cut = lengths.clip(9, most)
        assert (
            cut.turns[1] == turns and cut.output[1] == output and cut.clipped == sum(o > most for o in lengths.output)
        )
    plain = SampleLengths((1,), (9,))
    assert SampleLengths.joined((plain, lengths)).turns == ((Turn(9, 0.0, 0),), *lengths.turns)
    assert SampleLengths.joined((plain, plain)).turns == () and plain.drawn == (9,)
