"""A run on two machines of two ranks (testkit/machines.py) has the bits of one machine, sends what its plan says, and
ends by name where the network or a machine goes."""

import json
import re
import time
from pathlib import Path

import pytest
from testkit.machines import Machines, Popen, machines
from testkit.paths import ROOT, TESTS
from testkit.programs import call_tool, ended, eventually, ranks_of
from testkit.runs_table import Runs, assert_same_bits, begin_again, in_the_checkout, metrics_of

from rlhfuse.planning.report.report import PlanReport
from rlhfuse.planning.report.traffic import traffic_lines

CONFIG = ROOT / "examples" / "quickstart.yaml"
COUNTED = TESTS / "testkit" / "counted_training.py"
ITERATIONS = 3
SETTINGS = f"""trainer.iterations={ITERATIONS} trainer.save_every=1 trainer.tensorboard=false fusion.threshold=16
    fusion.search_seconds=0.3 rollout.max_response_tokens=192 fusion.actor_microbatches=2"""
SERIAL = "fusion.inter_stage=false fusion.intra_stage=serial"
HANG_SECONDS = 30
LIMITS = f"trainer.watchdog_seconds=10 trainer.hang_seconds={HANG_SECONDS}"


@pytest.fixture(scope="module")
def one_machine(runs) -> Runs:
    """Has the run that nothing disturbs, on four ranks of one machine, and goes on with others there."""
    start(runs, "whole")
    return runs


def start(runs: Runs, name: str, *settings: str) -> Path:
    runs.start(name, SETTINGS, *settings, config=CONFIG, ranks=4, watch=in_the_checkout)
    return runs.folder / name


@pytest.fixture
def two(programs, tmp_path):
    with machines(programs, tmp_path) as made:
        for node in (0, 1):
            made.set(node, "ipv4/tcp_retries2", 5)  # else torchrun waits a quarter of an hour for the other machine
        yield made


class Job:
    """The quickstart under two torchruns, which noted what their machines sent."""

    def __init__(self, two: Machines, run: Path, *settings: str) -> None:
        words = ["--config", CONFIG, f"trainer.output_dir={run}", *SETTINGS.split(), *" ".join(settings).split()]
        self.run, self.counts = run, run.with_name("counts")
        self.torchruns: list[Popen] = two.launch(2, *words, program=COUNTED, COUNTED=str(self.counts))

    def await_iteration(self, number: int) -> None:
        """Wait until both machines have begun it."""

        def begun() -> bool:
            assert all(torchrun.poll() is None for torchrun in self.torchruns), self.said()
            return all(number in self._sent_before(node) for node in (0, 1))

        eventually(begun)

    def _sent_before(self, node: int) -> dict[int, int]:
        """Bytes that a machine had sent when an iteration began."""
        file = Path(f"{self.counts}.{node}")
        lines = file.read_text().splitlines() if file.exists() else []
        return {int(line.split()[0]): int(line.split()[1]) for line in lines}

    def said(self) -> list[str]:
        """What both machines said, once they have ended."""
        return [ended(torchrun) for torchrun in self.torchruns]

    def ranks(self) -> list[int]:
        """Process ids of all ranks that live."""
        return [
            pid for torchrun in self.torchruns if torchrun.poll() is None for pid in ranks_of(torchrun.pid).values()
        ]

    def sent(self, iteration: int) -> int:
        """Bytes that both machines sent in an iteration."""
        noted = [self._sent_before(node) for node in (0, 1)]
        return sum(before[iteration + 1] - before[iteration] for before in noted)


def first_iterations(run: Path, count: int, folder: Path) -> Path:
    """A folder with the first lines of a run's metrics alone."""
    folder.mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:count]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def test_it_is_one_machines_run_and_a_cut_link_ends_it_by_name_on_both_sides(one_machine, two, tmp_path):
    """Fused, at 200 Mbit/s, which the run sees in its own transfers."""
    two.rate(200)
    whole, job = one_machine.folder / "whole", Job(two, tmp_path / "run", LIMITS)
    job.await_iteration(2)
    two.cut(1)
    cut = time.monotonic()
    said = job.said()
    print(f"ended {time.monotonic() - cut:.1f} s after the cut")
    assert [torchrun.returncode for torchrun in job.torchruns] == [1, 1]
    silent = re.search(r"rank [23] \(pid \d+ on n1\) died: silent for (\d+) s", said[0])
    assert silent and int(silent[1]) <= HANG_SECONDS, said[0]
    assert "this machine (n1) is cut off" in said[1], said[1]
    one, other = (first_iterations(run, 2, tmp_path / name) for name, run in (("one", whole), ("two", job.run)))
    assert_same_bits(one, other)

    planned = PlanReport.from_dict(json.loads((job.run / "plan.json").read_text()))
    assert planned.memory.ranks_per_node == 2 and any(row.across for row in planned.traffic)
    words = ["--config", CONFIG, *SETTINGS.split(), f"trainer.output_dir={tmp_path / 'dry'}", "--world-size", "4"]
    dry = call_tool("train_ppo", *words, "--dry-run", LOCAL_WORLD_SIZE="2").stdout
    assert all(line in dry for line in traffic_lines(planned.traffic)), dry
    seen = ["--lengths", job.run / "metrics.jsonl"]
    known = json.loads(call_tool("plan", *words, "--json", *seen, LOCAL_WORLD_SIZE="2").stdout)
    across = sum(row["across"] for row in known["traffic"])
    sent = [job.sent(iteration) for iteration in range(2)]
    print(f"planned {across}, sent {sent}")
    assert all(abs(one / across - 1) < 0.05 for one in sent), (across, sent)
    costs = json.loads((job.run / "costs.json").read_text())
    assert 1 / costs["migration"]["slopes"][0] == pytest.approx(25e6, rel=0.3), costs["migration"]


def test_a_link_that_heals_is_nothing_and_one_machine_goes_on_without_the_other(one_machine, two, tmp_path):
    """Serial: a cut that heals is nothing; a machine that vanishes is named; one machine goes on."""
    run = one_machine.folder / "resumed"
    job = Job(two, run, SERIAL, LIMITS)
    job.await_iteration(1)
    two.cut(1)
    time.sleep(3)
    two.heal(1)
    job.await_iteration(2)
    two.cut(1)
    two.kill(1)
    said = job.said()[0]
    assert job.torchruns[0].returncode == 1 and ("rank 2 " in said or "rank 3 " in said) and "on n1" in said, said
    begin_again(run)
    start(one_machine, "resumed", SERIAL, "trainer.resume=auto")
    assert [row["iteration"] for row in metrics_of(run)] == list(range(ITERATIONS))
    assert len(assert_same_bits(one_machine.folder / "whole", run)) == 3


@pytest.mark.slow
def test_a_cut_while_a_checkpoint_is_saved(one_machine, programs, tmp_path):
    """With the kernel's own patience ranks end by name all the same, and only the other machine's torchrun stays."""
    run, partial = one_machine.folder / "saving", "checkpoints/iteration-2.partial"
    with machines(programs, tmp_path) as two:
        job = Job(two, run, LIMITS)
        eventually(lambda: (run / partial).exists() or (run / partial).with_suffix("").exists(), job.said)
        two.cut(1)
        cut = time.monotonic()
        eventually(lambda: not job.ranks())
        print(f"all ranks ended {time.monotonic() - cut:.1f} s after the cut")
        two.kill(1)
        said = job.said()
    assert "rank 2 " in said[0] or "rank 3 " in said[0], said[0]
    assert "this machine (n1) is cut off" in said[1], said[1]
    begin_again(run)
    start(one_machine, "saving", "trainer.resume=auto")
    assert len(assert_same_bits(one_machine.folder / "whole", run)) == 3
