"""A rehearsal's process of one rank: python -m rehearsal.process JOB OUT, both JSON files."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

from rehearsal.shim import load_shim

from rlhfuse.base.errors import leave


def main(job: Path, out: Path) -> None:
    """Rehearse what the job says; progress goes to stdout, what came out to `out`."""
    load_shim()
    warnings.filterwarnings("ignore")  # of Apex, of kernels that are not used here, of fake tensors
    from rehearsal.rank import Rehearsal
    from rehearsal.stages import rehearsal_draft

    from rlhfuse.config.load import load_config
    from rlhfuse.planning.plan import Plan

    asked, begin = json.loads(job.read_text()), time.perf_counter()
    draft = rehearsal_draft(load_config(asked["config"], asked["overrides"]), asked["world_size"])
    plan = replace(Plan.parse(asked["plan"]), costs=draft.costs)

    def progress(text: str) -> None:
        print(f"rank {asked['rank']}, {time.perf_counter() - begin:4.0f} s: {text}", flush=True)

    rehearsal = Rehearsal(draft, plan, asked["rank"], progress)
    out.write_text(json.dumps(asdict(rehearsal.run(tuple(asked["phases"])))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
