"""Where a check works: the device, a folder of its own, the CPU's references, and random models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.options import Attention
from rlhfuse.models.hf_names import expected_tensors
from rlhfuse.parallel.device import Device, choose_device

TINY = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, vocab_size=200, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip
LLAMA = dict(
    TINY, vocab_size=128256, max_position_embeddings=16384, rope_theta=500000.0, num_attention_heads=32,
    num_key_value_heads=8, torch_dtype="bfloat16",
)  # fmt: skip
SHAPES = {
    "tiny": TINY,  # in the place of each other where there is no GPU
    "1b": dict(
        LLAMA, hidden_size=2048, num_hidden_layers=16, head_dim=64, intermediate_size=8192, tie_word_embeddings=True
    ),
    "8b": dict(LLAMA, hidden_size=4096, num_hidden_layers=32, head_dim=128, intermediate_size=14336),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Bench:
    """One check's surroundings. The device is touched at its first use, so that a check may fork ranks before it."""

    kind: str  # "cuda" or "cpu"
    folder: Path
    references: References
    rank: int = 0  # of a check on several GPUs

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @cached_property
    def device(self) -> Device:
        return choose_device(self.kind, self.rank, 1)

    @property
    def where(self) -> torch.device:
        return self.device.torch_device

    @property
    def attention(self) -> Attention:
        """Whose kernels engines of checks read their caches with: flashinfer's are compiled where first asked for."""
        return "triton" if self.on_gpu else "auto"

    @contextmanager
    def one_rank(self) -> Iterator[None]:
        """A process group of this process alone, over NCCL on a GPU."""
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # public, but its stub is not
        dist.init_process_group(self.device.process_group, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def synchronize(self) -> None:
        self.device.synchronize()

    def tiny(self, scalar_head: bool = False) -> Path:
        """A small random model, the same on every machine."""
        folder = self.folder / ("reward" if scalar_head else "actor")
        return write_model(folder, TINY, scalar_head=scalar_head, seed=int(scalar_head), references=self.references)


def random_tensors(spec: ModelSpec, scalar_head: bool, seed: int) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face names."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for key, size in expected_tensors(spec, scalar_head).items():
        noise = torch.randn(size, generator=generator)
        tensors[key] = 1 + 0.1 * noise if len(size) == 1 else noise * size[-1] ** -0.5
    return tensors


def write_model(
    folder: Path, shape: dict, *, scalar_head: bool = False, seed: int = 0, references: References | None = None
) -> Path:
    """A random Hugging Face folder of this shape, with a tokenizer of one word per id."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir(parents=True)
    config = dict(shape)
    if scalar_head:
        config |= {
            "architectures": ["LlamaForSequenceClassification"],
            "num_labels": 1,
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "pad_token_id": 0,
        }
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_config(folder)
    known = references or References(None)
    tensors = known.get(f"weights_{seed}", lambda: random_tensors(spec, scalar_head, seed))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(spec.vocab)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


class References:
    """Values by name, in a folder of files; without a folder, or without the file, they are computed here."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """Numbers, lists, dicts and CPU tensors that `compute` gives, or gave where the files were written."""
        file = self._folder and self._folder / f"{name}.pt"
        if file and file.is_file():
            return torch.load(file, weights_only=True)
        return compute()

    @staticmethod
    def write(folder: Path, name: str, value: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(value, folder / f"{name}.pt")
