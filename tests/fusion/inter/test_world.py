"""Generation and inference of many small clusters, each one process in an order of its own: every one ends, and gives
what the serial run gives."""

import gc
import sys
from collections import Counter

import pytest
import torch
from testkit.world.faults import PLANTED, ticket_read_and_written_apart
from testkit.world.life import Broken, Setting, live

LIVES, MOST = 2000, 5000


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is there already is not looked through again after each life
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)
    assert torch.is_grad_enabled()  # the lives give the thread back as it was


@pytest.fixture
def plant(monkeypatch):
    return lambda fault: monkeypatch.setattr(*fault())


def first_found(folder) -> tuple[int, str]:
    """The first life that shows a fault, and what it says."""
    for seed in range(MOST):
        try:
            live(seed, folder)
        except Broken as broken:
            return seed, str(broken)
    raise AssertionError(f"no life of {MOST} shows it")


def test_every_life_ends_and_gives_what_the_serial_run_gives(tmp_path):
    lives = [live(seed, tmp_path) for seed in range(LIVES)]
    met = Counter()
    for life in lives:
        setting = life.setting
        met["failed" if life.ends else "migrated" if any(r.plan for r, _ in life.reports.values()) else "serial"] += 1
        met += Counter(one for one in ("filtered", "tools", "signature", "models", "mishap") if getattr(setting, one))
        met["a worker spans instances"] += setting.spanned > 1 and setting.models > 0
    assert len(met) == 9 and min(met.values()) > LIVES / 40, met


def test_settings_are_met_whole():
    """One instance, one sample, all of them left at the trigger: what is drawn has its limits too."""
    drawn = [Setting.draw(seed) for seed in range(LIVES)]
    assert {s.instances for s in drawn} == {1, 2, 3, 4, 6} and {s.tensor_ranks for s in drawn} == {1, 2}
    assert any(s.wanted * s.copies == s.threshold == 1 for s in drawn)
    assert any(s.wanted * s.copies == s.threshold > 8 for s in drawn)


def test_a_life_that_fails_is_lived_again_event_for_event(tmp_path, plant):
    plant(ticket_read_and_written_apart)
    seed, told = first_found(tmp_path)
    with pytest.raises(Broken) as again:
        live(seed, tmp_path)
    assert str(again.value) == told and "  rank 1: " in told


@pytest.mark.ci
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(tmp_path, plant, fault):
    plant(fault)
    seed, told = first_found(tmp_path)
    sys.stdout.write(f"{fault.__name__}: found by life {seed + 1}\n{told.splitlines()[0]}\n")
