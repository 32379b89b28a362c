"""CPU seconds of the exact search of layouts for 8 to 1024 GPUs, interpreter and imports included.

    python benchmarks/planner_speed.py [--sizes 8,64] [--examples llama3_8b_8gpus]

Every search is a process of its own with one thread (planner_speed_search.py); all of one size must print the same
bytes. Layouts, micro-batches and recomputation are auto; models are shapes of LLaMA, lengths are drawn from a
lognormal. Kernels are compiled before, a first search of each size is not counted; no training schedule is annealed.
Examples are searched as users do it, by tools/plan.py --search.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from harness import Figure, Measurement, named, options, take_turns
from paper.settings import SHAPES
from processes import ROOT, environment

from rlhfuse.base.kernel_cache import compile_apart
from rlhfuse.simulator.simulation import kernel_group
from rlhfuse.tools.program import run_program

SEARCH = Path(__file__).with_name("planner_speed_search.py")
PROMPT, RESPONSE, MEDIAN, SPREAD = 256, 1024, 200, 0.8  # tokens; SPREAD: of the logarithm
DRAWN = 4000  # past samples


@dataclass(frozen=True)
class Size:
    ranks: int
    actor: str
    critic: str
    samples: int
    goal: float  # CPU seconds

    def write(self, folder: Path) -> Path:
        """The run's configuration with shapes and lengths that lie in `folder`."""
        config = {
            "actor": {"path": str(folder / self.actor)},
            **{role: {"path": str(folder / self.critic)} for role in ("critic", "reward")},
            "data": {"train_files": ["none.jsonl"], "max_prompt_tokens": PROMPT},  # not read
            "rollout": {
                "prompts_per_iteration": self.samples // 4,
                "samples_per_prompt": 4,
                "max_response_tokens": RESPONSE,
            },
            "algorithm": {"minibatches": 8},
            "parallel": {**dict.fromkeys(("actor_train", "critic_train", "generation", "sequence_parallel"), "auto")},
            "trainer": {"device": "cuda", "hardware": "h100", "recompute": "auto"},
        }
        config["parallel"]["lengths"] = str(folder / "lengths.jsonl")
        file = folder / f"{self.ranks}.yaml"
        file.write_text(yaml.safe_dump(config))
        return file


SIZES = (
    Size(8, "7B", "7B", 512, 2.0),
    Size(64, "34B", "7B", 512, 3.0),
    Size(256, "70B", "7B", 1024, 6.0),
    Size(1024, "70B", "70B", 4096, 12.0),
)


EXAMPLES = {"llama3_8b_8gpus": 3.0, "llama3_70b_64gpus": 15.0}  # of this repository; goals, CPU seconds
MODELS = {
    "Llama-3-8B": "Llama 3 8B",
    "Llama-3-8B-reward": "Llama 3 8B",
    "Llama-3-70B": "70B",
    "Llama-3-70B-critic": "70B",
}


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--sizes", default=",".join(str(size.ranks) for size in SIZES), help="GPUs [%(default)s]")
    parser.add_argument("--examples", default=",".join(EXAMPLES), help="names of files in examples/ [%(default)s]")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.examples, arguments.rounds = "8", "llama3_8b_8gpus", 2
    measurement, rows = Measurement("planner_speed", arguments), []
    examples = named("--examples", arguments.examples, {name: name for name in EXAMPLES})
    sizes = named("--sizes", arguments.sizes, {str(size.ranks): size for size in SIZES})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.seed)
        compile_apart([kernel_group()])
        sides = {str(size.ranks): lambda _, size=size: search(size, folder) for size in sizes}
        found = take_turns(sides, arguments.rounds, warm_up=True)
        asked = {name: lambda _, name=name: search_example(name, folder) for name in examples}
        taken = take_turns(asked, arguments.rounds, warm_up=True)
    for size in sizes:
        printed, seconds = zip(*found[str(size.ranks)])
        if len(set(printed)) > 1:
            raise RuntimeError(f"{size.ranks} GPUs: searches found different things:\n{'---'.join(set(printed))}")
        rows.append(row(measurement, size, json.loads(printed[0]), Figure.of(seconds, "s")))
    head = ("GPUs", "actor/critic", "samples", "tables", "drafted", "priced", "best s", "all others", "CPU s", "table")
    measurement.table("sizes", "The search of layouts, in one process and thread", head, rows)
    head, lines = ("example", "CPU s, here"), [example_row(measurement, name, taken[name]) for name in examples]
    measurement.table("examples", "tools/plan.py --search of the examples, in one process and thread", head, lines)
    measurement.finish()


def search(size: Size, folder: Path) -> tuple[str, float]:
    """What one search printed, and the CPU seconds of its process."""
    return searched([SEARCH, size.write(folder), str(size.ranks)], environment(1))


def search_example(name: str, folder: Path) -> tuple[str, float]:
    """The same of the fastest tables of an example, whose models are in `folder`."""
    command = [ROOT / "tools/plan.py", "--config", ROOT / f"examples/{name}.yaml", "--search", "--json"]
    said, seconds = searched(command, environment(1), folder)
    return json.dumps(json.loads(said)["tables"]), seconds


def searched(command: Sequence[str | Path], variables: Mapping[str, str], folder: Path = ROOT) -> tuple[str, float]:
    """What a Python program printed that ran in `folder`, and the CPU seconds of its process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, *map(str, command)]
    finished = subprocess.run(words, env=dict(variables), cwd=folder, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{finished.stderr}")
    return finished.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def example_row(measurement: Measurement, name: str, answers: Sequence[tuple[str, float]]) -> list[str]:
    """Keep the figure of an example; its line of the table."""
    printed, seconds = zip(*answers)
    if len(set(printed)) > 1:
        raise RuntimeError(f"{name}: searches found different tables")
    figure = Figure.of(seconds, "s").at_most(EXAMPLES[name])
    return [name, measurement.part(name).figure("here", figure).text(".1f")]


def row(measurement: Measurement, size: Size, found: dict[str, Any], seconds: Figure) -> list[str]:
    """Keep the figures of a size; its line of the table."""
    best, bound, figures = found["rows"][0], found["bound"], measurement.part(str(size.ranks))
    counts = [f"{figures.value(name, found[name]):,.0f}" for name in ("tables", "drafted", "priced")]
    figures.value("best", best[1], "s")
    spent = figures.figure("cpu_seconds", seconds.at_most(size.goal))
    ends = [f"{best[1]:.4g}", f">= {bound:.4g}", spent.text(".1f"), best[0]]
    return [f"{size.ranks}", f"{size.actor}/{size.critic}", f"{size.samples}", *counts, *ends]


def write_inputs(folder: Path, seed: int) -> None:
    """config.json of every shape, and past lengths."""
    shapes = {"7B": "7B", "34B": "34B", "70B": "70B", **MODELS}
    for name, like in shapes.items():
        layers, hidden, heads, kv_heads, mlp = SHAPES[like]
        shape = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
        shape |= {"num_key_value_heads": kv_heads, "intermediate_size": mlp}
        shape |= {"vocab_size": 128256 if name in MODELS else 32000}
        shape |= {"model_type": "llama", "max_position_embeddings": 16384, "eos_token_id": 2}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    generator = np.random.default_rng(seed)
    prompts = generator.integers(PROMPT // 4, PROMPT + 1, DRAWN)
    outputs = np.clip(generator.lognormal(np.log(MEDIAN), SPREAD, DRAWN), 1, RESPONSE).astype(int)
    lines = (json.dumps({"prompt_length": int(p), "output_length": int(o)}) for p, o in zip(prompts, outputs))
    (folder / "lengths.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_program(main)
