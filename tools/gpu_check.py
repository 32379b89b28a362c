"""Everything that only a GPU can show, in one call: each check compares CUDA with the CPU or with plain formulas.

    bash scripts/gpu_check.sh                    all checks; the last line printed is one JSON object
    python tools/gpu_check.py --device cpu       a rehearsal: the same checks with the CPU in the GPU's place

A failing check is recorded and does not stop the others. Models are random and made here, nothing is downloaded.
Exit code 0 when all checks are good, 1 when one failed. Without CUDA nothing is checked, which the object says, and
the exit code is 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist
from gpu_checks import generation, speed
from gpu_checks.result import TOLERANCE, relative, require, run_check

from rlhfuse.base.errors import run_program
from rlhfuse.config.settings import OptimizerConfig
from rlhfuse.config.spec import ModelSpec, ParallelLayout
from rlhfuse.models.build import build_model, fill
from rlhfuse.models.heads import LanguageOutput
from rlhfuse.models.hf import load_weights
from rlhfuse.models.hf_names import expected_tensors
from rlhfuse.models.stage import PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.device import Device, choose_device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.offload import OffloadedWeights
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.parallel.reshard import Resharder

TINY = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=200,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    hidden_act="silu",
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    torch_dtype="float32",
)


# random models ------------------------------------------------------------------------------------------------


def write_model(folder: Path, shape: dict, *, scalar_head: bool = False, seed: int = 0) -> Path:
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
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, size in expected_tensors(spec, scalar_head).items():
        noise = torch.randn(size, generator=generator)
        tensors[key] = 1 + 0.1 * noise if len(size) == 1 else noise * size[-1] ** -0.5
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(spec.vocab)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    words.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


# the checks ---------------------------------------------------------------------------------------------------


def train_once(model: Path, where: Device, dtype: torch.dtype) -> dict[str, Any]:
    """One micro-batch and one optimizer step of a whole model on one rank: loss, gradients, weights after."""
    spec, grid = ModelSpec.from_config(model), plain_grid(ParallelLayout(1, 1, 1))
    groups = GroupMaker(60.0).for_model("check", grid, 0)
    built = build_model(spec, grid, groups, 0, scalar_head=False, dtype=dtype, device=where)
    fill(built, load_weights(model, spec))
    optimizer = ModelOptimizer({0: built}, OptimizerConfig(lr=1e-3), groups, where)
    stage = TrainingStage(PipelineStage(optimizer.module, first=True, last=True, scalar_head=False))
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, spec.vocab, (n,), generator=generator).tolist() for n in (9, 30, 17)]
    packed = PackedTokens.pack(rows, where.torch_device)
    targets = packed.tokens.roll(-1)[: sum(map(len, rows))]
    losses = []

    def loss(output: LanguageOutput, _: int) -> torch.Tensor:
        logprobs = output.logprobs(slice(len(targets)), targets, spec.vocab, 1.0)[0]
        losses.append(-logprobs.mean())
        return losses[-1]

    optimizer.zero_grad()
    stage.forward(0, packed, None, loss)
    stage.backward(0, None)
    parameters: list[tuple[str, Any]] = list(built.named_parameters())
    gradients = {name: p.main_grad.float().cpu().clone() for name, p in parameters}
    optimizer.finish_gradients()
    norm = optimizer.step(1e-3).grad_norm
    return {"loss": float(losses[0].detach()), "norm": norm, "gradients": gradients, "model": built, "spec": spec}


def check_training(model: Path, device: Device, dtype: torch.dtype) -> dict:
    """Loss, gradient norm and every gradient of one step, on the device against the CPU."""
    here = train_once(model, choose_device("cpu", 0, 1), dtype)
    there = train_once(model, device, dtype)
    errors = {name: relative(there["gradients"][name], wanted) for name, wanted in here["gradients"].items()}
    worst = max(errors, key=lambda name: errors[name])
    detail = {
        "loss": there["loss"],
        "loss_on_cpu": here["loss"],
        "grad_norm": there["norm"],
        "grad_norm_on_cpu": here["norm"],
        "worst_gradient": worst,
        "relative_error": errors[worst],
    }
    return require(
        abs(there["loss"] - here["loss"]) < TOLERANCE[dtype] * abs(here["loss"])
        and abs(there["norm"] - here["norm"]) < 2 * TOLERANCE[dtype] * here["norm"]
        and errors[worst] < 10 * TOLERANCE[dtype],
        detail,
    )


def check_reshard(model: Path, device: Device) -> dict:
    """Weights that an optimizer step has just written arrive bit for bit in another module."""
    trained = train_once(model, device, torch.float32)
    grid = plain_grid(ParallelLayout(1, 1, 1))
    groups = GroupMaker(60.0).for_model("copy", grid, 0)
    copy = build_model(trained["spec"], grid, groups, 0, scalar_head=False, dtype=torch.float32, device=device)
    Resharder(device).reshard([trained["model"]], copy)
    source = dict(trained["model"].named_parameters())
    different = [name for name, p in copy.named_parameters() if not torch.equal(p, source[name])]
    return require(not different, {"weights": len(source), "different": different[:3]})


def check_offloaded(device: Device) -> dict:
    """Weights leave the device and come back with the same bits, several times; device memory is given back."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(device.torch_device)
    wanted = [p.detach().cpu().clone() for p in module.parameters()]
    size = sum(p.numel() * p.element_size() for p in wanted)

    def allocated() -> int:
        return torch.cuda.memory_allocated(device.torch_device) if device.is_cuda else 0

    offloaded, before = OffloadedWeights(module, device), allocated()
    offloaded.offload()
    freed, seconds = before - allocated(), 0.0
    for _ in range(3):
        start = time.perf_counter()
        offloaded.load()
        device.synchronize()
        seconds = time.perf_counter() - start
        same = all(torch.equal(p.cpu(), w) for p, w in zip(module.parameters(), wanted))
        require(same, "loaded weights differ from those that were offloaded")
        offloaded.release()
    detail = {"bytes": size, "freed_bytes": freed, "load_bytes_per_second": size / seconds}
    return require(freed >= size or not device.is_cuda, detail)


def check_ppo(folder: Path, device: torch.device) -> dict:
    """Two PPO iterations of the whole program on one rank, on the repository's tiny models or on random ones."""
    tiny = ROOT / "examples" / "tiny"
    have = (tiny / "actor" / "config.json").exists() and (tiny / "reward" / "config.json").exists()
    actor = tiny / "actor" if have else write_model(folder / "actor", TINY)
    reward = tiny / "reward" if have else write_model(folder / "reward", TINY, scalar_head=True, seed=1)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{3 + i} w{40 + i}"}) + "\n" for i in range(8)))
    run = folder / "run"
    config = {
        "actor": {"path": str(actor), "optim": {"lr": 1e-4}},
        "reward": {"path": str(reward)},
        "data": {"train_files": [str(prompts)], "max_prompt_tokens": 32},
        "rollout": {"prompts_per_iteration": 4, "samples_per_prompt": 4, "max_response_tokens": 48},
        "algorithm": {"minibatches": 2},
        "fusion": {"search_seconds": 1.0, "actor_microbatches": 2},
        "trainer": {"iterations": 2, "output_dir": str(run), "device": device.type},
    }
    file = folder / "check.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [str(ROOT / "tools" / "train_ppo.py"), "--config", str(file)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder)
    seconds = time.perf_counter() - start
    require(done.returncode == 0, {"exit_code": done.returncode, "end": (done.stdout + done.stderr)[-1500:]})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    difference = max(line["rollout/train_logprob_abs_diff"] for line in lines)
    detail = {
        "iterations": len(lines),
        "seconds": round(seconds, 1),
        "train_logprob_abs_diff": difference,
        "models": "examples/tiny" if have else "random",
    }
    return require(len(lines) == 2 and difference < 1e-4, detail)


# the whole ----------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict:
    """What the figures were measured on."""
    facts: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "device": str(device),
        "flash_attn": None,
        "nccl": None,
    }
    if importlib.util.find_spec("flash_attn"):
        from importlib.metadata import version

        facts["flash_attn"] = version("flash_attn")
    if device.type == "cuda":
        from torch.cuda import nccl

        properties = torch.cuda.get_device_properties(device)
        facts["nccl"] = ".".join(map(str, nccl.version()))
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
        facts["devices"] = torch.cuda.device_count()
    return facts


def all_checks(device: Device, folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Names and checks, cheap ones first."""
    where, tiny = device.torch_device, write_model(folder / "tiny", TINY)
    checks: list[tuple[str, Callable[[], Any]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        checks.append((f"varlen_attention_{name}", lambda dtype=dtype: generation.check_varlen(where, dtype)))
        for block in (16, 256):  # flash-attn takes over at 256
            at, sizes = f"{name}_{block}", (where, dtype, block)
            checks += [
                (f"paged_attention_{at}", lambda sizes=sizes: generation.check_paged(*sizes)),
                (f"decode_attention_{at}", lambda sizes=sizes: generation.check_decode_attention(*sizes)),
                (f"engine_{at}", lambda sizes=sizes: generation.check_engine(tiny, *sizes)),
            ]
        checks.append((f"graphs_{name}", lambda dtype=dtype: generation.check_graphs(tiny, where, dtype)))
        checks.append((f"training_{name}", lambda dtype=dtype: check_training(tiny, device, dtype)))
    checks.append(("reshard", lambda: check_reshard(tiny, device)))
    checks.append(("offloaded_weights", lambda: check_offloaded(device)))
    checks.append(("ppo_one_rank", lambda: check_ppo(folder, where)))
    for size, block in (("1b", 16), ("1b", 256), ("8b", 256)):
        shape, batches = (speed.SHAPES[size], speed.BATCHES) if device.is_cuda else (TINY, (1, 4))
        measured = (shape, folder / size, where, block, batches)
        checks.append((f"speed_{size}_{block}", lambda measured=measured: speed.measure(*measured)))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every CUDA path of rlhfuse on this machine.")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: rehearse the checks on the CPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only the checks whose name holds this text")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and args.device == "auto":
        report = {"cuda": False, "environment": environment(torch.device("cpu")), "checks": []}
        print(json.dumps({**report, "said": "no CUDA device here: nothing was checked"}))
        return 0
    device = choose_device("cpu" if args.device == "cpu" else "cuda", 0, 1)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  public, but its stub is not
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        checks = [(name, check) for name, check in all_checks(device, Path(folder)) if args.only in name]
        results = [run_check(name, check) for name, check in checks]
    dist.destroy_process_group()
    ok = all(result.ok for result in results)
    report = {"cuda": device.is_cuda, "ok": ok, "environment": environment(device.torch_device)}
    print(json.dumps({**report, "checks": [asdict(result) for result in results]}))
    return 0 if ok else 1


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main, tear_down=False)
