"""Generation with and without guesses of the tail, in turns, on policies that a training run left behind.

    python benchmarks/speculation.py [--policies FOLDER] [--cases small,large,plain]

Trains stories by GRPO and PPO and the quickstart, keeps the actor of every iteration, and sets it into the shape of a
larger model (wide_models.py; FOLDER/wide). What the policies before it wrote is the guesser's history. The tail begins
when a fifth of the samples are unfinished (R_t 20 %). Tokens and log-probabilities are the same on both sides, or it
ends. With one thread the process's CPU time is taken, so that other programs count less.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from harness import DATA, Figure, Measurement, counting, named, options, take_turns, trace_lengths
from learning import story_config, story_model, story_settings
from processes import ROOT, train
from wide_models import widen

from rlhfuse.base.errors import InputError
from rlhfuse.config.load import load_config
from rlhfuse.config.spec import ModelSpec
from rlhfuse.costs.speculation import DRAFT_ITERATIONS
from rlhfuse.data.prompts import prompts_from
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.models.cpu.tiles import share_threads
from rlhfuse.models.hf import load_weights
from rlhfuse.run.preflight import read_prompts, run_tokenizer
from rlhfuse.tools.checkpoint_conversion import convert, open_checkpoint
from rlhfuse.tools.program import run_program

TRACES = {"arxiv": "arxiv_llama2tok.csv", "azure": "azure2023_conv.csv", "sharegpt": "sharegpt8k_llama2tok.csv"}
LONGEST, HISTORY_TOKENS, TAIL = 400, 200, 0.2
SMALL, LARGE = "4.5M", "77M"
TAIL_GOALS = {(SMALL, "grpo"): 1.5, (SMALL, "ppo"): 1.3, (SMALL, "quickstart"): 1.5}
LARGE_GOAL, NEVER_SLOWER = 2.0, 0.98
STORIES = (f"rollout.max_response_tokens={HISTORY_TOKENS}", "rollout.ignore_eos=true")
RUNS = {  # ranks, settings beside the example's: rewards climb without a collapse of the entropy
    "grpo": (2, ("actor.optim.lr=2e-4", *STORIES)),
    "ppo": (2, ("algorithm.kl_coef=0.02", *STORIES)),
    "quickstart": (4, ()),
}
ITERATIONS = (0, 5, 15)
CASES = ("small", "large", "plain")


@dataclass(frozen=True)
class Policies:
    """The actors of a run by iteration, and the prompts that each was given."""

    run: Path

    def folder(self, iteration: int) -> Path:
        """The actor that wrote this iteration's responses."""
        if iteration == 0:
            return Path(load_config(self.run / "config.yaml").actor.path)
        out = self.run / f"hf-{iteration}"
        if not out.exists():
            convert(open_checkpoint(self.run / "checkpoints" / f"iteration-{iteration}"), "actor", out)
        return out

    def prompts(self, iteration: int) -> list[list[int]]:
        config = load_config(self.run / "config.yaml")
        prompts = read_prompts(config, run_tokenizer(config, ModelSpec.from_config(self.folder(0))))
        copies, count = config.rollout.samples_per_prompt, config.rollout.prompts_per_iteration
        indices = prompts_from(len(prompts), config.trainer.seed, iteration * count, count)
        return [list(prompts[i].tokens) for i in indices for _ in range(copies)]


@dataclass(frozen=True)
class Generated:
    """One iteration's samples on one engine."""

    responses: list[tuple]  # prompt, tokens, log-probabilities, finish reason; by sample
    seconds: float
    tail_seconds: float
    tail_steps: int
    accepted: int


def open_engine(folder: Path, draft_rows: int | None, random_weights: bool = False) -> Engine:
    spec = ModelSpec.from_config(folder)
    weights = load_weights(folder, spec, dtype=torch.float32)
    if random_weights:
        made = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(value.shape, generator=made) * 0.02 if value.dim() > 1 else torch.ones_like(value)
            for name, value in weights.items()
        }
    return Engine(spec, weights, EngineOptions(num_blocks=64 * 32, draft_rows=draft_rows))


def generate(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    first: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Generated:
    """All samples at once; their noise is that of the sample ids `first` and on."""
    for number, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add(first + number, prompt, param)
    results, steps, accepted, tail = [], 0, 0, 0.0
    start = clock()
    while engine.has_unfinished():
        if not tail and engine.samples <= TAIL * len(prompts):
            tail = clock()
        results += engine.step()
        steps += bool(tail)
        accepted += engine.last_step.accepted_tokens
    end = clock()
    results.sort(key=lambda one: one.sample_id)
    responses = [(one.prompt_tokens, one.tokens, one.logprobs, one.finish_reason) for one in results]
    return Generated(responses, end - start, end - tail, steps, accepted)


class Bench:
    """The cases share what they train, and add their figures to the measurement."""

    def __init__(
        self,
        measurement: Measurement,
        rounds: int,
        policies: dict[str, Policies],
        iterations: Sequence[int],
        folder: Path,
        clock: Callable[[], float],
    ) -> None:
        """`folder`: where wide models are kept."""
        self.measurement, self.rounds, self.policies, self.folder = measurement, rounds, policies, folder
        self.iterations, self.clock = iterations, clock
        self.rows: list[list[str]] = []
        self._written: dict[tuple[str, int, bool], list[tuple]] = {}

    def params(self, lengths: str, iteration: int, count: int) -> list[SamplingParams]:
        base = SamplingParams(max_tokens=LONGEST, ignore_eos=lengths != "natural", seed=1)
        if lengths == "natural":
            return [base] * count
        drawn = trace_lengths(DATA / "traces" / TRACES[lengths], count, 16, LONGEST, iteration + 1)
        return [replace(base, max_tokens=tokens) for tokens in drawn.output]

    def written(self, name: str, iteration: int, natural: bool) -> list[tuple]:
        """(prompt, response) of an iteration, as its policy wrote it."""
        key = name, iteration, natural
        if key in self._written:
            return self._written[key]
        prompts = self.policies[name].prompts(iteration)
        param = SamplingParams(max_tokens=LONGEST if natural else HISTORY_TOKENS, ignore_eos=not natural, seed=1)
        engine = open_engine(self.policies[name].folder(iteration), 0)
        made = generate(engine, prompts, [param] * len(prompts), 1000 * iteration)
        self._written[key] = [(prompt, tokens) for prompt, tokens, *_ in made.responses]
        return self._written[key]

    def compare(self, name: str, iteration: int, shape: str, lengths: str, random_weights: bool = False) -> None:
        """A row: the tail and the whole of one iteration, both sides in turns."""
        case = f"{'random' if random_weights else name}.it{iteration}.{shape}.{lengths}".lower()
        wide = self.folder / f"{name}-{iteration}-{shape}"
        if not wide.exists():
            widen(self.policies[name].folder(iteration), shape, wide)
        sides = {draft_rows: open_engine(wide, draft_rows, random_weights) for draft_rows in (0, None)}
        prompts = self.policies[name].prompts(iteration)
        params = self.params(lengths, iteration, len(prompts))
        before = range(max(0, iteration - DRAFT_ITERATIONS), iteration)
        history = [self.written(name, number, lengths == "natural") for number in before]

        def side(draft_rows: int | None) -> Generated:
            engine = sides[draft_rows]
            engine.scheduler.preempt_all()  # and forgets the prefixes of the round before
            if engine.loop.guesser:
                measured = engine.loop.guesser.measured
                engine.loop.guesser = engine.new_guesser()
                if iteration and engine.loop.guesser:  # a run that has come so far has measured its steps
                    engine.loop.guesser.measured = measured
                for responses in history:
                    engine.learn(responses)
            return generate(engine, prompts, params, 1000 * iteration, self.clock)

        turns = take_turns({"plain": lambda _: side(0), "guessed": lambda _: side(None)}, self.rounds, warm_up=True)
        plain, guessed = turns["plain"], turns["guessed"]
        for one in (*plain, *guessed):
            assert one.responses == plain[0].responses, f"{case}: guesses changed a sample"
        nats = -np.mean(np.concatenate([logprobs for _, _, logprobs, _ in plain[0].responses]))
        tail = Figure.ratio([one.tail_seconds for one in plain], [one.tail_seconds for one in guessed])
        whole = Figure.ratio([one.seconds for one in plain], [one.seconds for one in guessed])
        whole = whole.at_least(NEVER_SLOWER)
        if nats > 0.8 and not random_weights and lengths != "sharegpt":
            tail = tail.at_least(LARGE_GOAL if shape == LARGE else TAIL_GOALS[shape, name])
        self.measurement.figure(f"{case}.tail", tail)
        self.measurement.figure(f"{case}.whole", whole)
        size = sorted(len(tokens) for _, tokens, *_ in plain[0].responses)
        policy = "random weights" if random_weights else f"{name}, iteration {iteration}"
        cells = [f"{policy}, {shape}", lengths, f"{nats:.2f}", f"{size[len(size) // 2]}, {size[-1]}"]
        cells += [f"{plain[0].tail_steps} -> {guessed[0].tail_steps}", tail.text(), whole.text()]
        self.rows.append(cells)
        self.measurement.say("  ".join(cells))


def main() -> None:
    parser = options(__doc__, rounds=5, seed=False)
    parser.add_argument("--model", metavar="FOLDER", help="stories260K in Hugging Face layout")
    parser.add_argument("--policies", metavar="FOLDER", help="keep the trained runs there, and take those that are")
    parser.add_argument("--threads", type=counting, default=os.cpu_count(), help="[%(default)s]")
    parser.add_argument("--cases", default=",".join(CASES), help="[%(default)s]")
    arguments = parser.parse_args()
    cases = named("--cases", arguments.cases, {name: name for name in CASES})
    model, quick = story_model(arguments.model), arguments.quick
    torch.set_num_threads(arguments.threads)
    if share_threads() != arguments.threads:
        raise InputError(f"--threads {arguments.threads}: NUMBA_NUM_THREADS or OMP_NUM_THREADS allows fewer; unset it")
    iterations = (0, 1) if quick else ITERATIONS
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    measurement = Measurement("speculation", arguments)
    with tempfile.TemporaryDirectory() as name:
        kept = Path(arguments.policies or name).resolve()
        policies = {run: Policies(made(run, kept / run, model, max(iterations) + 1)) for run in RUNS}
        rounds = 1 if quick else arguments.rounds
        bench = Bench(measurement, rounds, policies, iterations, kept / "wide", clock)
        bench.folder.mkdir(exist_ok=True)
        if "small" in cases:
            for policy in RUNS:
                for iteration in iterations:
                    traces = list(TRACES)[:1] if quick else TRACES  # stories have no end of their own
                    for lengths in ("natural",) if policy == "quickstart" else traces:
                        bench.compare(policy, iteration, SMALL, lengths)
        if "large" in cases:
            for policy, lengths in (("grpo", "arxiv"), ("ppo", "arxiv"), ("quickstart", "natural")):
                bench.compare(policy, iterations[-1], LARGE, lengths)
        if "plain" in cases:
            for lengths in ("arxiv", "sharegpt"):
                bench.compare("grpo", 0, SMALL, lengths, random_weights=True)
        columns = ("policy", "lengths", "nats a token", "p50, max", "steps of the tail", "tail", "whole generation")
        measurement.table("speculation", "Times as fast with guesses", columns, bench.rows)
    measurement.facts(threads=arguments.threads, clock=clock.__name__, tail=TAIL)
    measurement.finish()


def made(run: str, folder: Path, model: Path, iterations: int) -> Path:
    """The folder of the run, trained unless it is there."""
    ranks, settings = RUNS[run]
    if not (folder / "finished.json").exists():
        config, more = ROOT / "examples" / "quickstart.yaml", (f"trainer.iterations={iterations}",)
        if run != "quickstart":
            config, more = story_config(run), story_settings(model, iterations)
        kept = ("trainer.save_every=1", f"trainer.keep_checkpoints={iterations}", "trainer.export=false")
        train(config, folder, (*more, *settings, *kept), ranks=ranks)
    return folder


if __name__ == "__main__":
    run_program(main)
