"""One rank of a benchmark of several: its process group of one thread each, and random Llamas on it, or in folders."""

from __future__ import annotations

import gc
import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from processes import TIMEOUT_SECONDS
from safetensors.torch import save_file

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.build import build_model
from rlhfuse.models.hf_names import expected_tensors
from rlhfuse.parallel.device import choose_device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid
from rlhfuse.tools.cost_profiles.work import randomise


class ModelRank:
    """One of several ranks on one thread, and random Llamas on it."""

    def __init__(self, rank: int, world: int) -> None:
        """Joins the other ranks."""
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=world)
        self.rank, self.device, self.maker = rank, choose_device("cpu", 0, 1), GroupMaker(TIMEOUT_SECONDS)

    def groups(self, name: str, grid: ModelGrid) -> ProcessGroupCollection:
        return self.maker.for_model(name, grid, self.rank)

    def llama(self, name: str, spec: ModelSpec, grid: ModelGrid, scalar_head: bool, seed: int) -> torch.nn.Module:
        """This rank's part of a model, with weights as a fresh Llama has them."""
        kind = dict(scalar_head=scalar_head, dtype=torch.float32, device=self.device)
        model = build_model(spec, grid, self.groups(name, grid), self.rank, **kind)
        randomise(model, seed)
        return model


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


@contextmanager
def together() -> Iterator[None]:
    """From a barrier on, without pauses of Python's collector."""
    gc.collect()
    gc.disable()
    try:
        barrier()
        yield
    finally:
        gc.enable()


def write_llama(
    folder: Path, seed: int, scalar_head: bool = False, tokenizer: Path | None = None, **shape: int
) -> Path:
    """A folder in Hugging Face layout of a Llama of this `shape`, with weights as a fresh one has them."""
    kind = "ForSequenceClassification" if scalar_head else "ForCausalLM"
    config = {"model_type": "llama", "architectures": [f"Llama{kind}"], "torch_dtype": "float32", **shape}
    if scalar_head:
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json") if tokenizer else ():
        shutil.copy(tokenizer / name, folder)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, size in expected_tensors(ModelSpec.from_config(folder), scalar_head).items():
        tensors[key] = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
