"""Samples per second of whole GRPO training beside TRL's, on the same task, taken in turns.

    benchmarks/setup_peers.sh trl .venv-trl                       makes TRL's environment, apart from this one
    python benchmarks/end_to_end.py --trl-python .venv-trl/bin/python

The task is examples/stories_grpo.yaml on stories260K. Both use two cores: this project as two ranks of one thread; TRL
as one process of two threads or two of one, whichever a short trial finds faster. Start-up and the first iterations
are left out, and a run's speed is that of its median iteration; reward and tokens show that both did the same work.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import Figure, Measurement, counting, options, peer_python, take_turns
from learning import story_config, story_model, story_settings
from processes import ROOT, run, torchrun, train

from rlhfuse.config.load import load_config
from rlhfuse.monitor.phase_times import whole_seconds
from rlhfuse.tools.program import run_program

OWN, TRL = "rlhfuse", "trl"
RATIO_GOAL = 2.2
WARM_UP = 2  # iterations of each start that are not measured: kernels, first allocations, the first choice of R_t
WAYS = {"1x2": "1 process x 2 threads", "2x1": "2 processes x 1 thread"}  # how TRL takes two cores


@dataclass(frozen=True)
class Speed:
    """One start of one engine."""

    iteration_seconds: list[float]  # those measured
    samples: int  # in each iteration
    rewards: list[float]  # mean of every iteration
    tokens: float  # mean response

    @property
    def samples_per_second(self) -> float:
        return self.samples / statistics.median(self.iteration_seconds)

    def __str__(self) -> str:
        ends = f"reward {self.rewards[0]:+.2f} -> {self.rewards[-1]:+.2f} in {len(self.rewards)} iterations"
        return f"{self.samples_per_second:.1f} samples/s, {ends}"


def main() -> None:
    parser = options(__doc__, rounds=4, seed=False)
    parser.add_argument("--trl-python", metavar="FILE", required=True, help="Python of TRL's environment")
    parser.add_argument("--model", metavar="FOLDER", help="stories260K in Hugging Face layout")
    parser.add_argument("--trl-way", choices=("trial", *WAYS), default="trial", help="processes x threads [trial]")
    parser.add_argument("--iterations", type=counting, default=16, help="measured in each start")
    arguments = parser.parse_args()
    python, model = peer_python("--trl-python", arguments.trl_python, "trl"), story_model(arguments.model)
    rounds, measured = (1, 2) if arguments.quick else (arguments.rounds, arguments.iterations)
    measurement, versions = Measurement("end_to_end", arguments), {}

    def trl(way: str, count: int) -> Speed:
        speed = run_trl(python, way, model, count, versions)
        measurement.say(f"  trl, {WAYS[way]}: {speed}")
        return speed

    def own(_: int) -> Speed:
        speed = run_own(model, WARM_UP + measured)
        measurement.say(f"  rlhfuse, 2 ranks x 1 thread: {speed}")
        return speed

    way, trial = arguments.trl_way, {}
    if way == "trial":
        trial = {name: trl(name, WARM_UP + max(2, measured // 2)).samples_per_second for name in WAYS}
        way = max(trial, key=lambda name: trial[name])
    runs = take_turns({OWN: own, TRL: lambda _: trl(way, WARM_UP + measured)}, rounds)
    speeds = {engine: [speed.samples_per_second for speed in each] for engine, each in runs.items()}
    ratio = measurement.figure("ratio", Figure.ratio(speeds[OWN], speeds[TRL]).at_least(RATIO_GOAL))
    rows = []
    for engine, cores in ((OWN, "2 ranks x 1 thread"), (TRL, WAYS[way])):
        figure = measurement.figure(f"{engine}.samples_per_second", Figure.of(speeds[engine], "samples/s"))
        tokens = statistics.mean(speed.tokens for speed in runs[engine])
        numbers = (figure.value, figure.least, figure.most, tokens)
        rows.append([engine, cores, *(f"{number:.1f}" for number in numbers)])
    columns = ("engine", "cores taken as", "samples/s", "least", "most", "tokens per response")
    measurement.table("speed", f"End to end: {ratio.text()} times TRL", columns, rows)
    measurement.facts(versions=versions, trial=trial, trl_way=WAYS[way])
    measurement.facts(runs={engine: [asdict(speed) for speed in each] for engine, each in runs.items()})
    measurement.finish()


def run_own(model: Path, iterations: int) -> Speed:
    with tempfile.TemporaryDirectory() as folder:
        settings = story_settings(model, iterations, "trainer.tensorboard=false")
        rows = train(story_config("grpo"), Path(folder) / "run", settings)
    kept = rows[WARM_UP:]
    return Speed(
        [whole_seconds(row) for row in kept],
        len(rows[0]["lengths/output"]),
        [row["critic/score/mean"] for row in rows],
        statistics.mean(row["response_length/mean"] for row in kept),
    )


def run_trl(python: str, way: str, model: Path, iterations: int, versions: dict[str, str]) -> Speed:
    """`versions`: filled with what TRL's environment holds."""
    config = load_config(story_config("grpo"))
    processes, threads = map(int, way.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "trl.json"
        settings = {
            "model": str(model),
            "prompts": str(ROOT / config.data.train_files[0]),
            "out": str(out),
            "folder": folder,
            "steps": iterations + 1,  # the first has no end before it to count from
            "prompts_per_step": config.rollout.prompts_per_iteration,
            "generations": config.rollout.samples_per_prompt,
            "tokens": config.rollout.max_response_tokens,
            "lr": config.actor.optim.lr,
            "threads": threads,
            "seed": config.trainer.seed,
        }
        launcher = torchrun(processes, python) if processes > 1 else [python]
        run([*launcher, Path(__file__).with_name("end_to_end_trl.py"), json.dumps(settings)], threads=threads)
        said = json.loads(out.read_text())
    versions |= said["versions"]
    return Speed(
        said["step_seconds"][WARM_UP:],
        config.samples_per_iteration,
        said["reward"],
        statistics.mean(said["tokens"]),
    )


if __name__ == "__main__":
    run_program(main)
