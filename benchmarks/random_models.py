"""One rank of a benchmark of several: its process group of one thread each, and random Llamas on it, or in folders."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rlhfuse.config.spec import ModelSpec
from rlhfuse.models.build import build_model
from rlhfuse.models.hf_names import expected_tensors
from rlhfuse.parallel.device import Device
from rlhfuse.parallel.groups import GroupMaker, ModelGrid


def join_ranks(rank: int, world: int) -> None:
    """Join the other ranks, with one thread each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)


def barrier() -> None:
    dist.all_reduce(torch.zeros(1))


def random_llama(
    name: str,
    spec: ModelSpec,
    grid: ModelGrid,
    maker: GroupMaker,
    rank: int,
    device: Device,
    scalar_head: bool,
    seed: int,
) -> torch.nn.Module:
    """This rank's part of a model, with weights as a fresh Llama has them."""
    groups = maker.for_model(name, grid, rank)
    model = build_model(spec, grid, groups, rank, scalar_head=scalar_head, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def write_llama(folder: Path, seed: int, tokenizer: Path, scalar_head: bool, **shape: int) -> Path:
    """A folder in Hugging Face layout of a Llama of this `shape`, with weights as a fresh one has them."""
    kind = "ForSequenceClassification" if scalar_head else "ForCausalLM"
    config = {"model_type": "llama", "architectures": [f"Llama{kind}"], "torch_dtype": "float32", **shape}
    if scalar_head:
        config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, size in expected_tensors(ModelSpec.from_config(folder), scalar_head).items():
        tensors[key] = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
