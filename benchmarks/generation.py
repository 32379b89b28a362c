"""Speed of the generation engine beside vLLM and transformers on one CPU machine, in one run.

    benchmarks/setup_peers.sh .venv-vllm                     makes vLLM's environment, apart from this one
    python benchmarks/generation.py --vllm-python .venv-vllm/bin/python --plot speed.png --out speed.json
    python benchmarks/generation.py --quick                  the same in small, to see that it runs: no measurement

All engines run the same random Llama in float32 from the same files, on the same threads, with the same prompts,
forced response lengths and sampling: temperature 1 over the whole vocabulary (this project's engine also returns the
log-probability of every token). Each is a process of its own, and all are alive while they are asked in turns, another
one first in each round; `idle_cpu_share` says how much of a core each one took while another was measured. Before
that, a short trial finds each engine's best configuration for many sequences (A), for few (C) and for both (B, E, F);
all that was tried and what was chosen is printed. Prompts are new in each round, so no prefix cache answers for a
model. Figures are medians over rounds; a ratio is another engine's seconds over this one's, with the least and the
most of a single round.

    A   64 sequences x 128 tokens of a 4.5M-parameter model, and the matrix products of these steps alone
    B   256 requests, 64 at a time, with real long-tailed lengths; transformers in static batches of 64
    C   milliseconds per token of each sequence at batch 1, 2, 4, 8
    D   share of this engine's decode step outside the model's forward pass, and a profile of the rest
    E   decode steps of a 100M-parameter model against max(bytes / memory bandwidth, operations / GEMM rate)
    F   milliseconds of a decode step over the context (batch 8) and over the batch (context 64)

In D "forward pass" is all of ModelRunner.forward, so scheduling, batch building, sampling and bookkeeping are outside.
In E the bytes are all weights once and the keys and values of every sequence once; the bandwidth is the higher one
of reading a 2 GiB buffer and one as large as the weights, which may lie in a cache. Nothing else should run meanwhile:
two threads that wait for each other on a busy machine are many times slower.

Progress goes to stderr, one JSON object to stdout.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from generation_cases import CASES, FULL, QUICK, TRACE, Bench, Sizes, trace_lengths
from generation_peers import OWN, Fleet, Model, choose, known_peers
from generation_plot import draw
from generation_worker import SPARE
from search_runs import console, counting, finish, machine

from rlhfuse.errors import InputError, run_program
from rlhfuse.files import write_bytes

HEAD_DIM = 64
SMALL = {  # 4.5M parameters
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "vocab_size": 512,
}
LARGE = {  # 100M
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2048,
    "vocab_size": 16384,
}
IDLE_LIMIT = 0.05  # of a core: more than this and the engines were not alone
GOALS = (  # case, peer, ratio
    ("A", "vllm", 1.2),
    ("A", "transformers", 1.7),
    ("B", "vllm", 1.5),
    ("B", "transformers", 5.0),
)
OUTSIDE_GOAL = 0.25  # of a decode step, at the sequences of A


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the engines are ended too
    arguments = parse_arguments()
    cases = chosen_cases(arguments.cases)
    if "B" in cases and arguments.trace is not None:
        trace_lengths(Path(arguments.trace), 1, 1, arguments.seed)  # bad input is said before anything is measured
    sizes = QUICK if arguments.quick else FULL
    pythons, left_out = known_peers(filter(None, arguments.peers.split(",")), arguments.vllm_python)
    screen = console()
    trace = Path(arguments.trace or TRACE)
    if "B" in cases and arguments.trace is None and not trace.exists():
        cases.remove("B")
        left_out["B"] = f"no --trace, and {TRACE.name} is not beside the repository"
    for name, reason in left_out.items():
        screen.print(f"{name} is left out: {reason}", highlight=False)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = write_models(folder, sizes, arguments.quick, arguments.seed)
        rounds = 1 if arguments.quick else arguments.rounds
        with Fleet(pythons, arguments.threads, rounds, folder, screen) as fleet:
            bench = Bench(fleet, sizes, arguments.seed, models, trace, screen)
            screen.print("Configurations, tried briefly:" if not arguments.no_trial else "Configurations: no trial")
            tried = choose(fleet, models["small"], None if arguments.no_trial or arguments.quick else bench.trial)
            configurations = report_chosen(fleet, screen)
            results = run_cases(cases, bench)
            result = {
                "benchmark": "generation",
                "machine": {**machine(), "threads": arguments.threads, "load_before": load},
                "ended": time.strftime("%Y-%m-%dT%H:%M:%S"),
                "rounds": rounds,
                "seed": arguments.seed,
                "quick": arguments.quick,
                "sampling": "temperature 1 over the whole vocabulary, forced lengths, float32",
                "versions": fleet.versions,
                "left_out": left_out,
                "configurations": configurations,
                "tried": tried,
                "idle_cpu_share": fleet.idle_shares(),
                "ratios": {case: found["ratios"] for case, found in results.items() if "ratios" in found},
                "goals": [] if arguments.quick else goals(results),
                "cases": results,
            }
    for peer, share in result["idle_cpu_share"].items():
        if share > IDLE_LIMIT:
            screen.print(f"{peer} took {share:.0%} of a core while idle: the figures are not to be trusted")
    if arguments.plot:
        write_bytes(arguments.plot, draw(results["F"]))
    finish(result, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cases", default=",".join(CASES), help="such as A,C")
    parser.add_argument("--peers", default="vllm,transformers", help="engines to compare with")
    parser.add_argument("--vllm-python", metavar="FILE", help="Python of vLLM's environment; none leaves vLLM out")
    parser.add_argument("--threads", type=counting, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--rounds", type=counting, default=5, help="in which the engines are asked in turns")
    parser.add_argument("--seed", type=counting, default=1)
    parser.add_argument("--trace", metavar="FILE", help=f"CSV with a column num_decode_tokens, for B [{TRACE.name}]")
    parser.add_argument("--no-trial", action="store_true", help="take the first configuration of each engine")
    parser.add_argument("--quick", action="store_true", help="one round of small sizes without trial")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves of F")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON object here")
    arguments = parser.parse_args()
    if arguments.plot and "F" not in chosen_cases(arguments.cases):
        raise InputError(f"--plot {arguments.plot} draws case F, which --cases {arguments.cases} leaves out; add F")
    return arguments


def chosen_cases(text: str) -> list[str]:
    """Letters of the cases, in order. Raises InputError for another."""
    names = [word.strip().upper() for word in text.split(",")]
    for name in names:
        if name not in CASES:
            raise InputError(f"--cases {text}: {name!r} is not a case; give some of {','.join(CASES)}")
    return sorted(set(names))


def write_models(folder: Path, sizes: Sizes, quick: bool, seed: int) -> dict[str, Model]:
    """Random checkpoints in Hugging Face layout: small for A-D, large for E, and small with a long context for F."""
    room = sizes.decode_steps + SPARE
    limit = sizes.limit_context + room
    longest = max(sizes.contexts) + room
    long_tokens = max(sizes.context_batch * longest, max(sizes.batches) * (sizes.batch_context + room))
    rows = (
        ("small", SMALL, sizes.context, sizes.sequences, sizes.sequences * sizes.context),
        ("large", SMALL if quick else LARGE, limit, max(sizes.limit_batches), max(sizes.limit_batches) * limit),
        ("long", SMALL, longest, max(*sizes.batches, sizes.context_batch), long_tokens),
    )
    return {
        name: Model(write_model(folder / name, shape, context, seed), max_sequences, cache_tokens)
        for name, shape, context, max_sequences, cache_tokens in rows
    }


def write_model(folder: Path, shape: dict[str, int], context: int, seed: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = LlamaConfig(**shape, head_dim=HEAD_DIM, max_position_embeddings=context)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def report_chosen(fleet: Fleet, screen: Any) -> dict[str, Any]:
    """What each engine runs in, printed and for the JSON object."""
    found: dict[str, Any] = {}
    for peer in fleet.engines:
        found[peer] = {
            kind: {"name": chosen.name, "arguments": chosen.arguments, "environment": chosen.environment}
            for kind, chosen in fleet.chosen[peer].items()
        }
        kinds = ", ".join(f"{kind}: {chosen.name}" for kind, chosen in fleet.chosen[peer].items())
        screen.print(f"{peer} runs {kinds}", highlight=False)
    return found


def run_cases(cases: list[str], bench: Bench) -> dict[str, Any]:
    results = {}
    for case in cases:
        bench.screen.print(f"{case}: {CASES[case].__doc__.partition(': ')[2]}", highlight=False)
        if case in "EF":
            bench.fleet.close()  # another model: the processes of the last one need their memory no more
        results[case] = CASES[case](bench)
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals that this run measured, and whether they are reached."""
    found = [
        {"case": case, "figure": f"{peer} seconds / {OWN} seconds", "goal": goal, "measured": ratio["ratio"]}
        for case, peer, goal in GOALS
        if (ratio := results.get(case, {}).get("ratios", {}).get(peer))
    ]
    for row in found:
        row["reached"] = row["measured"] >= row["goal"]
    if "D" in results:
        share = results["D"]["rows"][0]["share_outside"]
        figure = "share of a decode step outside the forward pass"
        found.append(
            {"case": "D", "figure": figure, "goal": OUTSIDE_GOAL, "measured": share, "reached": share < OUTSIDE_GOAL}
        )
    return found


if __name__ == "__main__":
    run_program(main)
