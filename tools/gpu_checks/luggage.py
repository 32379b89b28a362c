"""Everything that `--prepare` computes: the CPU's side of the checks, by this checkout."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gpu_checks.bench import DTYPES, Bench, References, random_tensors
from gpu_checks.generation import engine_reference
from gpu_checks.sampling import draws_reference
from gpu_checks.training import training_reference

from rlhfuse.config.spec import ModelSpec


def write_references(folder: Path) -> None:
    """Weights of the random models, the engine's tokens and log-probabilities, gradients of one training step."""
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench("cpu", Path(scratch), References(None))
        model = bench.tiny()
        References.write(folder, "draws", draws_reference(References(None)))
        for seed in (0, 1):
            References.write(folder, f"weights_{seed}", random_tensors(ModelSpec.from_config(model), bool(seed), seed))
        with bench.one_rank():
            for kind in DTYPES:
                References.write(folder, f"engine_{kind}", engine_reference(bench, model, kind))
                References.write(folder, f"training_{kind}", training_reference(bench, model, kind))
