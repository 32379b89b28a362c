"""The paper's gains on paced ranks: the real program, of tiny models whose work lasts as long as large ones' would.

    python benchmarks/paced.py training [--only 16/8x16] [--rounds 3]
    python benchmarks/paced.py generation [--traces arxiv,azure,mooncake]
    python benchmarks/paced.py iterations [--cells 33B/13B:P] [--continue FILE]

Times are no measurement of hardware. They show whether overlap that is predicted is reached by executors, scheduler,
queue, migration and messages as they are, where nothing but work waits. Each row says how much CPU was used and how
much was late; one that is no evidence is marked. `training` forks 8 to 32 ranks and runs schedules of the paper's
Table 3; `generation` has 16 instances; `iterations` starts tools/train_ppo.py as users do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

from harness import options
from paced_generation import TRACES, generate
from paced_iterations import iterate
from paced_training import train

from rlhfuse.base.errors import run_program

PARTS: Mapping[str, Callable[[argparse.Namespace], None]] = {
    "training": train,
    "generation": generate,
    "iterations": iterate,
}


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", default="", help="training: some settings, as 16/8x16,8/8x8")
    parser.add_argument("--traces", default=",".join(TRACES), help="generation: lengths [%(default)s]")
    parser.add_argument(
        "--cells", default="all", help="iterations: actor/critic, padded or packed, as 33B/13B:P,33B/13B:K"
    )
    parser.add_argument("--continue", dest="journal", metavar="FILE", help="iterations: runs so far, kept and added to")
    arguments = parser.parse_args()
    PARTS[arguments.part](arguments)


if __name__ == "__main__":
    run_program(main)
