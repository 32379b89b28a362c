"""The library of schedules: what is kept is found again, the better one stays, bad entries are mended."""

import warnings
from dataclasses import replace

import pytest
from testkit.schedule_cases import check, random_problem, table_3

from rlhfuse.schedule.ir.evaluate import evaluate
from rlhfuse.schedule.rules.builders import greedy, one_at_a_time, serial_1f1b
from rlhfuse.schedule.search.library import Library, digest


@pytest.fixture
def library(tmp_path):
    return Library(tmp_path / "schedules")


def renamed(problem, names):
    pipelines = [replace(p, name=name, model=name[0]) for p, name in zip(problem.pipelines, names)]
    return replace(problem, pipelines=tuple(pipelines))


def test_what_is_kept_is_found_whatever_pipelines_are_called(library):
    for seed in range(20):
        problem = random_problem(seed)
        assert library.find(problem) is None
        library.keep(greedy(problem))
        assert library.find(problem) == greedy(problem)
        other = renamed(problem, "xyz")
        found = library.find(other)
        assert found.problem == other and check(other, found.orders)[0] == pytest.approx(
            evaluate(greedy(problem)).makespan
        )


def test_the_faster_schedule_stays_then_the_leaner(library):
    problem = table_3(2)
    rounds = (one_at_a_time, one_at_a_time), (greedy, greedy), (serial_1f1b, greedy), (one_at_a_time, greedy)
    for made, stays in rounds:
        library.keep(made(problem))
        assert library.find(problem) == stays(problem)


def test_a_digest_is_of_all_that_a_schedule_is_judged_by():
    problem = table_3(2, memory_cap=20, static_memory=4)
    same = table_3(2, memory_cap=(17.0,) * 8, static_memory=1.0), renamed(problem, "abc")
    assert {digest(one) for one in (problem, *same)} == {digest(problem)}
    first, *rest = problem.pipelines
    longer = replace(first, forward=(6, *first.forward[1:]))
    others = (
        replace(problem, memory_cap=21),
        replace(problem, memory_cap=None),
        replace(problem, transfer=1),
        replace(problem, pipelines=(longer, *rest)),
        replace(problem, pipelines=(replace(first, microbatches=5), *rest)),
        replace(problem, pipelines=(replace(first, placement=first.placement[::-1]), *rest)),
        replace(problem, pipelines=(replace(first, activation=(1, *first.activation[1:])), *rest)),
        replace(problem, pipelines=(replace(first, weight_gradient=first.forward), *rest)),
    )
    assert len({digest(one) for one in (problem, *others)}) == 1 + len(others)


@pytest.mark.parametrize("harm", ["{", '{"version": 2}', "missing", "deadlock", "over"])
def test_an_entry_that_cannot_be_used_is_told_of_once_and_written_anew(library, harm):
    problem = table_3(2, memory_cap=16)
    good = serial_1f1b(problem)
    library.keep(good)
    (file,) = library.folder.iterdir()
    text = file.read_text()
    if harm == "missing":
        text = text.replace("0:0F1 ", "", 1)
    elif harm == "deadlock":
        text = text.replace("node 7: 0:7F0 0:7B0", "node 7: 0:7B0 0:7F0")
    elif harm == "over":
        over = Library(library.folder.with_name("other"))
        roomy = replace(problem, memory_cap=None)
        over.keep(greedy(roomy))
        text = next(over.folder.iterdir()).read_text()
    else:
        text = harm
    assert text != file.read_text()
    file.write_text(text)
    with pytest.warns(UserWarning, match="written anew") as told:
        assert library.find(problem) is None
    assert len(told) == 1 and str(file) in str(told[0].message)
    with pytest.warns(UserWarning, match="written anew"):
        library.keep(good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert library.find(problem) == good


def test_without_a_folder_or_where_none_can_be_it_keeps_nothing(tmp_path, monkeypatch):
    nothing = Library.at("")
    nothing.keep(greedy(table_3(2)))
    assert nothing.find(table_3(2)) is None
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="does not keep"):
        Library.at(str(tmp_path / "file" / "folder")).keep(greedy(table_3(2)))
    monkeypatch.setenv("RLHFUSE_LIBRARY", str(tmp_path / "mine"))
    assert Library.at("auto").folder == tmp_path / "mine"
    monkeypatch.delenv("RLHFUSE_LIBRARY")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Library.at("auto").folder == tmp_path / "rlhfuse" / "schedules"
