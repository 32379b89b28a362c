"""Whole runs of the training job on pools of ranks: a table of configurations, one runner, and what each run left.

A row says what a run is asked for, start by start, what every line of its metrics shows, and which run it must be equal
to, bit for bit. All rows share one folder of models, prompts and reward functions. `Runs` makes a run when a test first
asks for it and keeps it for the others.
"""

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from run_comparison import compare_runs

from rlhfuse.base.files import write_json
from rlhfuse.monitor.metrics import read_metrics
from testkit.paced import paced
from testkit.paths import ROOT
from testkit.tiny import write_run, write_tokenizer
from testkit.workers import Pools

FUNCTIONS = """
import time
from pathlib import Path

def words(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str.split())) * float(ground_truth) + (extra_info or {}).get("bonus", 0)

def even(completion_ids):
    # a sample's share of what all of its prompt have: none can be called without the others
    counts = [1 + sum(i % 2 == 0 for i in ids) for ids in completion_ids]
    assert len(counts) == 2
    return [count / sum(counts) for count in counts]

real, slept = time.monotonic, 0

def slow(completion_ids):
    # a thousand seconds, by a clock of its own
    global slept
    slept += 1000
    time.monotonic = lambda: real() + slept
    return even(completion_ids)

def hits(completion_ids, wanted):
    return [sum(token % divisor == 0 for token in ids) / len(ids) for ids, divisor in zip(completion_ids, wanted)]

def hits_or_too_large(completion_ids, wanted):
    if wanted[0] == 3 and Path(__file__).with_name("too_large").exists():
        return [1e308] * len(wanted)  # infinity in float32
    return hits(completion_ids, wanted)

def words_where_odd(completion_ids, extra_info):
    # all samples of every second prompt score alike
    return [len(set(ids)) * (info["bonus"] % 2) for ids, info in zip(completion_ids, extra_info)]

def stopped(completion_ids, completions):
    return [is_stopped(ids, text) for ids, text in zip(completion_ids, completions)]

def odd(completion_ids):
    # half of the prompts of two samples have two equal scores
    return [1.0 + sum(ids) % 2 for ids in completion_ids]

def alike(completion_ids):
    return [1.0 for ids in completion_ids]

def odd_sample(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 2)

def is_stopped(ids, text):
    # word i is token i + 3; a response that ends with a word that begins with w19 is cut before it
    stopped = f"w{ids[-1] - 3}".startswith("w19")
    words = [i for i in ids if i > 2][: -1 if stopped else None]
    assert text == " ".join(f"w{i - 3}" for i in words) + (" " if stopped and words else ""), text
    assert not any(f"w{i - 3}".startswith("w19") for i in words[3:])
    return float(stopped)
"""
HELD_OUT = "data.val_files=[{folder}/held_out.jsonl]"
FUSED = "fusion.threshold=8"  # of 8 samples: instances meet while everything decodes
QUEUED = "rollout.max_sequences_per_instance=3"
SERIAL = "fusion.inter_stage=false fusion.intra_stage=false"
MOVED, STAYED = {"fusion/destinations": 1}, {"fusion/destinations": 0}


def by_function(name: str, algorithm: str = "grpo") -> str:
    """Scores of a function of FUNCTIONS alone, without a reward model or a critic."""
    function = f"reward.path='' reward.signature=trl reward.function={{folder}}/functions.py:{name}"
    return f"{function} algorithm.name={algorithm}"


def stages(layout: str) -> str:
    return f"parallel.actor_train={layout} parallel.critic_train={layout}"


@dataclass(frozen=True)
class Row:
    """A run: its settings, and those of a start that goes on with it; the run that it equals, and a pattern of what
    differs all the same; and metrics whose value is the same in every line."""

    first: str
    then: str = ""
    equals: str = ""
    but: str = "never"
    shows: Mapping[str, object] = field(default_factory=dict)


def pair(name: str, settings: str, fused: str = "", serial: str = "") -> dict[str, Row]:
    """A run whose samples all move, and the serial one, which is the same."""
    return {
        name: Row(f"{settings} {fused} {FUSED}", shows=MOVED),
        f"{name} serial": Row(f"{settings} {serial} {SERIAL}", equals=name, shows=STAYED),
    }


GRPO = """algorithm.kl_in=loss algorithm.kl_estimator=k3 algorithm.epochs=2 algorithm.kl_target=1
    algorithm.kl_horizon=100 critic.optim.lr=0.1"""
MIXED = """actor.tokenizer={folder}/tokenizer critic.path={folder}/actor trainer.iterations=1
    reward.function={folder}/functions.py:words reward.model_weight=0.5 reward.function_weight=2
    algorithm.clip_eps_high=0.28 algorithm.dual_clip=3 algorithm.missing_eos_penalty=1"""
BARE = "reference.path=none algorithm.kl_coef=0"
STEERED = "algorithm.name=rloo algorithm.kl_target=0.01 algorithm.kl_horizon=50 algorithm.scale_scores=true"
WARM = """critic.warmup_iterations=2 actor.optim.lr_scheduler_type=cosine critic.optim.lr_scheduler_type=linear
    critic.optim.min_lr_ratio=0.1 algorithm.kl_target=1 trainer.save_every=1 trainer.keep_checkpoints=9"""
WARM_ENDS = "actor.optim.lr_decay_iterations=2 critic.optim.lr_decay_iterations=4 trainer.export=false"
STOPS = "rollout.ignore_eos=true rollout.stop=[w19] rollout.min_tokens=4 rollout.max_response_tokens=24"
STOPPED = f"{by_function('stopped', 'rloo')} algorithm.missing_eos_penalty=1 {STOPS}"
BY_SAMPLE = f"""{by_function("stopped")} {STOPS} algorithm.policy_loss.loss_mode=gspo algorithm.top_entropy_quantile=0.5
    algorithm.mask_truncated_completions=true algorithm.kl_estimator=k3+ algorithm.entropy_coef=0.01
    algorithm.minibatches=2"""
CUT = f"""{stages("d1t2p1")} parallel.generation=d1t2p1 parallel.sequence_parallel=true trainer.recompute=full
    trainer.iterations=1"""
EVALUATED = f"{HELD_OUT} trainer.eval_every=1 trainer.eval_before_train=true eval.temperature=0"
STILL = f"""{by_function("hits")} {HELD_OUT} actor.optim.lr=0 trainer.eval_every=2 trainer.eval_before_train=true
    trainer.iterations=4 eval.samples_per_prompt=3 trainer.export=false trainer.keep_best=true"""
BEST = f"""{by_function("hits")} {HELD_OUT} actor.optim.lr=0.01 trainer.seed=2 trainer.iterations=4 trainer.save_every=1
    trainer.eval_every=1 trainer.keep_best=true trainer.keep_checkpoints=1 eval.samples_per_prompt=4"""
FILTERED = f"{by_function('odd')} {BARE} algorithm.filter_groups.enable=true trainer.iterations=3"
IN_ROUNDS = "algorithm.filter_groups.streaming=false"
ALONE = "parallel.generation=d1t2p1 parallel.actor_train=d1t2p1"
SPARED = f"{by_function('words_where_odd')} {BARE} algorithm.skip_zero_gradients=true"
PACED = "trainer.pace={folder}/pace.json trainer.pace_stretch=2 rollout.draft_rows=0 trainer.device=cpu"
SPLIT, RULE = "fusion.split_backward=true", "fusion.intra_stage="
TABLE: dict[str, Row] = {
    # PPO by a reward model, with which the critic begins
    "ppo": Row(f"{FUSED} {QUEUED}", shows={"fusion/threshold": 8, "fusion/instances": 2}),
    "ppo serial": Row(f"{SERIAL} {QUEUED}", equals="ppo", shows=STAYED),
    "ppo of another seed": Row(f"{FUSED} trainer.seed=2 trainer.iterations=1", shows=MOVED),
    "ppo evaluated": Row(
        f"{FUSED} {QUEUED} {EVALUATED} eval.max_response_tokens=16", equals="ppo", but=r"iteration (-1$|\d+ val/)"
    ),
    "ppo paced": Row(f"{FUSED} {QUEUED} {PACED}", equals="ppo"),
    # other algorithms and rewards
    **pair("grpo", GRPO, f"{by_function('slow')} trainer.trace_iterations=2", by_function("even")),
    **pair("mixed", MIXED),
    **pair("rloo", f"{by_function('even', 'rloo')} {BARE}"),
    **pair("reinforce", f"{by_function('even', 'reinforce++')} {BARE}"),
    **pair("stopped", STOPPED),
    # groups of equal scores are left out: as they are judged, with a tail and without, in rounds, and after a restart
    "filtered": Row(f"{FILTERED} fusion.threshold=3 {QUEUED}"),
    "filtered serial": Row(f"{FILTERED} {SERIAL}", equals="filtered", shows={"training/filter_groups/rounds": 1}),
    "filtered in rounds": Row(f"{FILTERED} {IN_ROUNDS} {FUSED}", equals="filtered"),
    "filtered resumed": Row(f"{FILTERED} trainer.save_every=1 trainer.iterations=1", FILTERED, equals="filtered"),
    "filtered one by one": Row(
        f"{FILTERED} reward.signature=verl reward.function={{folder}}/functions.py:odd_sample fusion.threshold=3"
    ),
    "filtered one by one, serial": Row(
        f"{FILTERED} reward.signature=verl reward.function={{folder}}/functions.py:odd_sample {SERIAL} {IN_ROUNDS}",
        equals="filtered one by one",
    ),
    "filtered beside a model": Row(  # whose part is less than a last bit of the function's: in rounds
        f"{FILTERED} reward.path={{folder}}/reward reward.model_weight=1e-30 {FUSED}"
    ),
    "filtered beside a model, serial": Row(
        f"{FILTERED} reward.path={{folder}}/reward reward.model_weight=1e-30 {SERIAL}", equals="filtered beside a model"
    ),
    "filled": Row(
        f"{FILTERED} {by_function('alike')} {FUSED} algorithm.filter_groups.max_num_gen_batches=2",
        shows={"training/filter_groups/places": "FFFFEEEE"},
    ),
    "filtered on tensor ranks": Row(f"{FILTERED} {ALONE}"),
    "filtered on tensor ranks, in rounds": Row(f"{FILTERED} {ALONE} {IN_ROUNDS}", equals="filtered on tensor ranks"),
    **pair("by sample", BY_SAMPLE),
    **pair("on wide workers", "parallel.reward_inference=d1t2p1 parallel.critic_inference=d1t2p1"),
    "spared": Row(f"{SPARED} {FUSED}", shows=MOVED),
    "spared resumed": Row(
        f"{SPARED} {SERIAL} trainer.save_every=1 trainer.iterations=1", f"{SPARED} {SERIAL}", equals="spared"
    ),
    # what moves from iteration to iteration goes on after a restart
    "steered": Row(f"{STEERED} trainer.iterations=3"),
    "steered resumed": Row(f"{STEERED} trainer.save_every=1", f"{STEERED} trainer.iterations=3", equals="steered"),
    "warm": Row(f"{WARM} trainer.iterations=4"),
    "warm resumed": Row(f"{WARM} {WARM_ENDS} trainer.iterations=1", f"{WARM} trainer.iterations=4", equals="warm"),
    # orders of training: searched with split backwards, by rule with whole ones
    "searched": Row(f"{stages('d1t1p2')} {SPLIT}"),
    "time sharing": Row(f"{stages('d1t1p2')} {RULE}time_sharing", equals="searched"),
    "one model after the other": Row(f"{stages('d1t1p2')} {RULE}serial", equals="searched"),
    "searched in chunks": Row(f"{stages('d1t1p2v2')} {SPLIT}"),
    "interleaved": Row(f"{stages('d1t1p2v2')} {RULE}interleaved", equals="searched in chunks"),
    "another order": Row(  # on other ranks, where the critic's stages are: its states are found wherever they were
        f"{stages('d1t1p2')} {RULE}time_sharing {SPLIT} trainer.iterations=1 trainer.save_every=1",
        f"{stages('d1t1p2')} {RULE}serial",
        equals="searched",
    ),
    "cut": Row(f"{CUT} {SPLIT}"),
    "cut, backwards whole": Row(f"{CUT} fusion.split_backward=false", equals="cut"),
    # held-out prompts; an actor that does not learn; the best of four evaluations
    "still": Row(f"{STILL} {FUSED}"),
    "still serial": Row(f"{STILL} {SERIAL}", equals="still"),
    "best": Row(BEST),
    "best resumed": Row(f"{BEST} trainer.iterations=3", BEST, equals="best"),
    "alone": Row(f"{by_function('hits')} {HELD_OUT} trainer.iterations=0 data.train_files=[] trainer.tensorboard=true"),
}


def write_shared(folder: Path) -> Path:
    """The configuration that every row's settings change: two iterations of eight samples, and held-out prompts."""
    more = {"rollout__max_response_tokens": 12, "rollout__samples_per_prompt": 2}
    file = write_run(folder, trainer__iterations=2, **more)
    (folder / "functions.py").write_text(FUNCTIONS)
    write_tokenizer(folder / "tokenizer", model_max_length=77)
    write_json(folder / "pace.json", paced({"actor": 2, "critic": 1}).to_dict())
    truth = {"data_source": "x", "reward_model": {"ground_truth": 0.1}}
    for name, count, wanted in (("prompts", 6, 2), ("held_out", 5, 3)):
        rows = [
            {"prompt": f"w{i} w{2 * i + count}", "wanted": wanted, "extra_info": {"bonus": i}, **truth}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


class Runs:
    """Runs by their name in TABLE, each made once; and runs of a test's own, started in the same folder."""

    def __init__(self, pools: Pools, folder: Path) -> None:
        self.folder, self.config = folder, write_shared(folder)
        self._pools, self._numbers, self._made = pools, itertools.count(), set()

    def __getitem__(self, name: str) -> Path:
        """The folder of a run that kept its row's promises."""
        row, run = TABLE[name], self.folder / name
        if name not in self._made:
            self.start(name, row.first)
            if row.then:
                begin_again(run)
                self.start(name, row.then, "trainer.resume=auto")
            for metrics in metrics_of(run):
                assert metrics.items() >= row.shows.items(), (metrics, row.shows)
            if row.equals:
                assert_same_bits(self[row.equals], run, but=row.but)
            self._made.add(name)
        return run

    def start(self, name: str, *settings: str, config: Path | None = None, ranks: int = 2, **more: Any) -> list[Any]:
        """One start in the folder of that name; returns what `job` says on every rank, which has the `more`."""
        words = [f"trainer.output_dir={self.folder / name}", *" ".join(settings).split()]
        given = [word.replace("{folder}", str(self.folder)) for word in words]
        job_name = f"{name}-{next(self._numbers)}"  # it prefixes keys in the store
        return self._pools.of(ranks).run(partial(job, **more), config or self.config, job_name, given)


def begin_again(run: Path) -> None:
    """Leave of a run only what a start needs that goes on with it."""
    (run / "finished.json").unlink(missing_ok=True)
    shutil.rmtree(run / "export", ignore_errors=True)


def job(
    rank: int,
    config: Path,
    name: str,
    settings: list[str],
    errors: bool = False,
    interrupted: str = "",
    watch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    device: Any = None,
) -> Any:
    """The job on this rank, on its `device` or the CPU over gloo. Returns what `watch` gives, a context around it.

    With `errors` one that ends the job on all ranks is caught: returns its kind and text. Rank 1 gets a SIGINT when it
    says that it is in `interrupted`.
    """
    import multiprocessing

    import torch.distributed as dist

    from rlhfuse.base.errors import JointError, NotFiniteError, RewardError, Stopped
    from rlhfuse.config.load import load_config
    from rlhfuse.monitor.guard import Guard
    from rlhfuse.monitor.watchdog import Watchdog
    from rlhfuse.parallel.device import choose_device
    from rlhfuse.run.launch import joint_inputs, run_job

    multiprocessing.current_process()._config["daemon"] = False  # a daemon may not start the reward's processes
    progress = Watchdog.progress

    def heard(self: Watchdog, doing: str) -> None:
        progress(self, doing)
        if rank == 1 and doing == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    with ExitStack() as around:
        around.enter_context(pytest.MonkeyPatch.context()).setattr(Watchdog, "progress", heard)
        seen = around.enter_context(watch())
        store = dist.PrefixStore(f"start/{name}", dist.distributed_c10d._get_default_store())
        inputs = joint_inputs(load_config(config, settings), store, rank, dist.get_world_size())
        guard = around.enter_context(Guard(rank, 540))
        try:
            run_job(inputs, name, rank, device or choose_device("cpu", 0, 1), guard)
        except (JointError, NotFiniteError, RewardError, Stopped) as error:
            if not errors:
                raise
            return f"{type(error).__name__}: {error}"
    return seen


@contextmanager
def printed():
    """What the job says on this rank: [its text]."""
    said: list[str] = []
    with contextlib.redirect_stdout(io.StringIO()) as text:
        yield said
    said.append(text.getvalue())


@contextmanager
def in_the_checkout():
    """Examples name their files from the repository's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return read_metrics(run / "metrics.jsonl")


def curves_of(folder: Path, *names: str) -> list[list[tuple[int, float]]]:
    """(step, value) of these scalars, as TensorBoard shows them: what a later start repeated is purged."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [[(event.step, event.value) for event in events.Scalars(name)] for name in names]


def plan_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "plan.json").read_text())


def assert_same_bits(one: Path, other: Path, but: str = "never") -> list[str]:
    """Both runs have the same metrics and exports, but for differences that match the pattern; what was compared."""
    compared = compare_runs(one, other)
    for found in compared:
        differences = [difference for difference in found.differences if not re.match(but, difference.where)]
        assert found.entries > 10 and not differences, (one, other, found.what, differences)
    return [found.what for found in compared]
