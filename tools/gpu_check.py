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
import traceback
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout as well as installed
warnings.filterwarnings("ignore", category=UserWarning, module="megatron")  # of Apex and kernels not used here
warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated", module="torch.distributed")

import torch
import torch.distributed as dist

from rlhfuse.config import OptimizerConfig
from rlhfuse.errors import run_program
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.models.attention import PagedQueries, paged_attention, varlen_attention
from rlhfuse.models.build import build_model, fill
from rlhfuse.models.heads import token_logprobs
from rlhfuse.models.hf import expected_tensors, load_weights
from rlhfuse.models.stage import PackedTokens, PipelineStage, TrainingStage
from rlhfuse.parallel.device import Device, choose_device
from rlhfuse.parallel.groups import GroupMaker, plain_grid
from rlhfuse.parallel.offload import ParkedWeights
from rlhfuse.parallel.optimizer import ModelOptimizer
from rlhfuse.parallel.reshard import Resharder
from rlhfuse.spec import ModelSpec, ParallelLayout

TINY = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, intermediate_size=96, vocab_size=200, max_position_embeddings=256,
    rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", bos_token_id=1, eos_token_id=2,
    tie_word_embeddings=False, torch_dtype="float32",
)  # fmt: skip
BILLION = dict(
    TINY, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
    intermediate_size=8192, vocab_size=128256, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Result:
    """One check's outcome; `detail` holds what was measured, or the error."""

    name: str
    ok: bool
    seconds: float
    detail: Any


class CheckFailed(Exception):
    """A comparison outside its bound; the message says what was compared."""


def require(good: bool, detail: Any) -> Any:
    """`detail`, or CheckFailed showing it."""
    if not good:
        raise CheckFailed(json.dumps(detail))
    return detail


def run_check(name: str, check: Callable[[], Any]) -> Result:
    """Run one check; whatever it raises is its result."""
    start = time.perf_counter()
    try:
        ok, detail = True, check()
    except Exception as error:  # recorded, so that the other checks still run
        place = traceback.extract_tb(error.__traceback__)[-1]
        ok, detail = False, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {json.dumps(detail)}", file=sys.stderr, flush=True)
    return Result(name, ok, round(time.perf_counter() - start, 3), detail)


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
        config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "id2label": {"0": "LABEL_0"},
                   "label2id": {"LABEL_0": 0}, "pad_token_id": 0}  # fmt: skip
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


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights of one whole model under Megatron-core names, made on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=dtype) * columns**-0.5

    ones = torch.ones(spec.hidden, device=device, dtype=dtype)
    qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    weights = {"embedding.word_embeddings.weight": draw(spec.vocab, spec.hidden)}
    weights["decoder.final_layernorm.weight"] = ones
    for number in range(spec.layers):
        prefix = f"decoder.layers.{number}."
        weights |= {
            f"{prefix}input_layernorm.weight": ones,
            f"{prefix}pre_mlp_layernorm.weight": ones,
            f"{prefix}self_attention.linear_qkv.weight": draw(qkv, spec.hidden),
            f"{prefix}self_attention.linear_proj.weight": draw(spec.hidden, spec.heads * spec.head_dim),
            f"{prefix}mlp.linear_fc1.weight": draw(2 * spec.mlp, spec.hidden),
            f"{prefix}mlp.linear_fc2.weight": draw(spec.hidden, spec.mlp),
        }
    if not spec.tied_embeddings:
        weights["output_layer.weight"] = draw(spec.vocab, spec.hidden)
    return weights


# the checks ---------------------------------------------------------------------------------------------------


def check_engine(model: Path, device: torch.device, dtype: torch.dtype, block_tokens: int) -> dict:
    """Greedy tokens on the CPU and on the device. float32: equal. bfloat16: log-probabilities close where equal."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 200, (n,), generator=generator).tolist() for n in (1, 3, 7, 17, 30, 64, 5, 5)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    options = EngineOptions(num_blocks=1024 * 16 // block_tokens, block_tokens=block_tokens)
    ours, theirs = (
        Engine.from_pretrained(model, options, device=where, dtype=dtype).generate(prompts, params)
        for where in ("cpu", device)
    )
    equal, total, difference = 0, 0, 0.0
    for a, b in zip(ours, theirs):
        total += len(a.tokens)
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), len(a.tokens))
        equal += same
        difference = max([difference, *(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same]))])
    detail = {"tokens": total, "equal_tokens": equal, "max_logprob_difference": difference}
    detail["block_tokens"] = block_tokens
    enough = equal == total if dtype == torch.float32 else equal >= total // 4  # after a near tie all differ
    return require(enough and difference < 2 * TOLERANCE[dtype], detail)


def reference_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int) -> torch.Tensor:
    """Causal attention of one sequence by its formula in float64; query i stands at position offset + i."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
    ahead = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + offset
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def check_varlen(device: torch.device, dtype: torch.dtype) -> dict:
    """Packed attention and its gradients against the formula, sequence by sequence."""
    generator = torch.Generator().manual_seed(2)
    lengths, heads, kv_heads, dim = (5, 1, 64, 130), 8, 2, 64
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    plain = [torch.randn(sum(lengths), h, dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]
    weight = torch.randn(sum(lengths), heads, dim, generator=generator)
    there = [x.to(device).detach().clone().requires_grad_(True) for x in plain]
    out = varlen_attention(*there, borders.to(device), max(lengths))
    (out.float() * weight.to(device)).sum().backward()
    here = [x.detach().double().clone().requires_grad_(True) for x in plain]
    ends = borders.tolist()
    wanted = torch.cat([reference_attention(*(x[a:b] for x in here), 0) for a, b in zip(ends, ends[1:])])
    (wanted * weight).sum().backward()
    found = {"forward": relative(out, wanted)}
    found |= {name: relative(a.grad, b.grad) for name, a, b in zip(("dq", "dk", "dv"), there, here)}
    return require(max(found.values()) < TOLERANCE[dtype], found)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, as a part of the largest number wanted."""
    wanted = wanted.detach().double().cpu()
    return float((found.detach().double().cpu() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def check_paged(device: torch.device, dtype: torch.dtype, block_tokens: int) -> dict:
    """Attention over cache blocks in any order against the formula: decode, prefill, and a chunk after a prefix."""
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, dim, blocks = 8, 2, 64, 40
    queries, contexts = [1, 12, 1, 5, 1], [1, 12, 300, 77, 64]
    keys, values = (torch.randn(blocks, block_tokens, kv_heads, dim, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(sum(queries), heads, dim, generator=generator).to(dtype)
    order, most, used = torch.randperm(blocks, generator=generator).tolist(), 300 // block_tokens + 1, 0
    tables = torch.zeros(len(queries), most, dtype=torch.int32)
    for s, context in enumerate(contexts):
        count = -(-context // block_tokens)
        tables[s, :count] = torch.tensor(order[used : used + count], dtype=torch.int32)
        used += count
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    paged = PagedQueries.of(tables.to(device), starts, contexts)
    found = paged_attention(q.to(device), keys.to(device), values.to(device), paged)
    wanted = []
    for s, context in enumerate(contexts):
        k, v = (x[tables[s].long()].flatten(0, 1)[:context] for x in (keys, values))
        wanted.append(reference_attention(q[starts[s] : starts[s + 1]], k, v, context - queries[s]))
    error = relative(found, torch.cat(wanted))
    return require(error < TOLERANCE[dtype], {"block_tokens": block_tokens, "relative_error": error})


def train_once(model: Path, where: Device, dtype: torch.dtype) -> dict[str, Any]:
    """One micro-batch and one optimizer step of a whole model on one rank: loss, gradients, weights after."""
    spec, grid = ModelSpec.from_config(model), plain_grid(ParallelLayout(1, 1, 1))
    groups = GroupMaker(60.0).for_model("check", grid, 0)
    built = build_model(spec, grid, groups, 0, scalar_head=False, dtype=dtype, device=where)
    fill(built, load_weights(model, spec))
    optimizer = ModelOptimizer(built, OptimizerConfig(lr=1e-3), groups, where)
    stage = TrainingStage(PipelineStage(optimizer.module, first=True, last=True, scalar_head=False))
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(3, spec.vocab, (n,), generator=generator).tolist() for n in (9, 30, 17)]
    packed = PackedTokens.pack(rows, where.torch_device)
    targets = packed.tokens.roll(-1)[: sum(map(len, rows))]
    losses = []

    def loss(logits: torch.Tensor, _: int) -> torch.Tensor:
        logprobs, _ = token_logprobs(logits[: len(targets)], targets, spec.vocab, 1.0, groups.tp)
        losses.append(-logprobs.mean())
        return losses[-1]

    optimizer.zero_grad()
    stage.forward(0, packed, None, loss)
    stage.backward(0, None)
    gradients = {name: p.main_grad.float().cpu().clone() for name, p in built.named_parameters()}
    optimizer.finish_gradients()
    norm = optimizer.step(1e-3).grad_norm
    return {"loss": float(losses[0].detach()), "norm": norm, "gradients": gradients, "model": built, "spec": spec}


def check_training(model: Path, device: Device, dtype: torch.dtype) -> dict:
    """Loss, gradient norm and every gradient of one step, on the device against the CPU."""
    here = train_once(model, choose_device("cpu", 0, 1), dtype)
    there = train_once(model, device, dtype)
    errors = {name: relative(there["gradients"][name], wanted) for name, wanted in here["gradients"].items()}
    worst = max(errors, key=lambda name: errors[name])
    detail = {"loss": there["loss"], "loss_on_cpu": here["loss"], "grad_norm": there["norm"],
              "grad_norm_on_cpu": here["norm"], "worst_gradient": worst, "relative_error": errors[worst]}  # fmt: skip
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
    Resharder(device).move(trained["model"], copy)
    source = dict(trained["model"].named_parameters())
    different = [name for name, p in copy.named_parameters() if not torch.equal(p, source[name])]
    return require(not different, {"weights": len(source), "different": different[:3]})


def check_parked(device: Device) -> dict:
    """Weights leave the device and come back with the same bits, several times; device memory is given back."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(8))).to(device.torch_device)
    wanted = [p.detach().cpu().clone() for p in module.parameters()]
    size = sum(p.numel() * p.element_size() for p in wanted)

    def allocated() -> int:
        return torch.cuda.memory_allocated(device.torch_device) if device.is_cuda else 0

    parked, before = ParkedWeights(module, device), allocated()
    parked.park()
    freed, seconds = before - allocated(), 0.0
    for _ in range(3):
        start = time.perf_counter()
        parked.begin_load()
        parked.finish_load()
        device.synchronize()
        seconds = time.perf_counter() - start
        same = all(torch.equal(p.cpu(), w) for p, w in zip(module.parameters(), wanted))
        require(same, "loaded weights differ from those that were parked")
        parked.release()
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
    detail = {"iterations": len(lines), "seconds": round(seconds, 1), "train_logprob_abs_diff": difference,
              "models": "examples/tiny" if have else "random"}  # fmt: skip
    return require(len(lines) == 2 and difference < 1e-4, detail)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy: what the memory can do, on this machine."""
    size = 1 << (30 if device.type == "cuda" else 26)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_decode(shape: dict, folder: Path, device: torch.device, block_tokens: int) -> dict:
    """Decode steps of a random bfloat16 model: tokens per second, and bytes it must read over the copy bandwidth."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    spec, prompt, steps = ModelSpec.from_config(folder), 128, 24
    element, longest = 2, 128 + 32
    weights = random_weights(spec, device, torch.bfloat16)
    weight_bytes = sum(w.numel() for w in {w.data_ptr(): w for w in weights.values()}.values()) * element
    bandwidth, rows = copy_bandwidth(device), {}
    for batch in (1, 16, 64):
        blocks = batch * -(-longest // block_tokens)
        options = EngineOptions(num_blocks=blocks, block_tokens=block_tokens, max_batched_tokens=batch * prompt)
        engine = Engine(spec, weights, options, device=device, dtype=torch.bfloat16)
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        for sample in range(batch):
            engine.add(sample, [3 + (sample + i) % 100 for i in range(prompt)], params)
        seconds, tokens, context = [], 0, 0
        while engine.has_unfinished() and len(seconds) < steps:
            engine.step()
            stats = engine.last_step
            if stats.prefill_tokens == 0:
                seconds.append(stats.seconds)
                tokens, context = stats.batch, stats.context_tokens
        median = sorted(seconds)[len(seconds) // 2]
        read = weight_bytes + context * spec.kv_bytes_per_token(element)
        rows[str(batch)] = {
            "tokens_per_second": round(tokens / median, 1),
            "step_seconds": median,
            "bandwidth_fraction": round(read / median / bandwidth, 4),
        }
        del engine
    return {"parameters": spec.parameters(), "block_tokens": block_tokens,
            "copy_bytes_per_second": bandwidth, "batch": rows}  # fmt: skip


# the whole ----------------------------------------------------------------------------------------------------


def environment(device: torch.device) -> dict:
    """What the figures were measured on."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda_of_torch": torch.version.cuda,
             "device": str(device), "flash_attn": None, "nccl": None}  # fmt: skip
    if importlib.util.find_spec("flash_attn"):
        from importlib.metadata import version

        found["flash_attn"] = version("flash_attn")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"name": properties.name, "memory_bytes": properties.total_memory}
        found["devices"] = torch.cuda.device_count()
    return found


def all_checks(device: Device, folder: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Names and checks, cheap ones first."""
    where, tiny = device.torch_device, write_model(folder / "tiny", TINY)
    roomy = device.is_cuda and torch.cuda.mem_get_info(where)[0] > 8 << 30
    checks: list[tuple[str, Callable[[], Any]]] = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        checks.append((f"varlen_attention_{name}", lambda dtype=dtype: check_varlen(where, dtype)))
        for block in (16, 256):  # flash-attn takes over at 256
            checks.append(
                (f"paged_attention_{name}_{block}", lambda dtype=dtype, block=block: check_paged(where, dtype, block))
            )
            checks.append(
                (f"engine_{name}_{block}", lambda dtype=dtype, block=block: check_engine(tiny, where, dtype, block))
            )
        checks.append((f"training_{name}", lambda dtype=dtype: check_training(tiny, device, dtype)))
    checks.append(("reshard", lambda: check_reshard(tiny, device)))
    checks.append(("parked_weights", lambda: check_parked(device)))
    checks.append(("ppo_one_rank", lambda: check_ppo(folder, where)))
    shape = BILLION if roomy else TINY
    for block in (16, 256):
        checks.append((f"decode_{block}", lambda block=block: measure_decode(shape, folder / "big", where, block)))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description="Check every CUDA path of rlhfuse on this machine.")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: rehearse the checks on the CPU")
    parser.add_argument("--only", metavar="TEXT", default="", help="run only the checks whose name holds this text")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and args.device == "auto":
        found = {"cuda": False, "environment": environment(torch.device("cpu")), "checks": []}
        print(json.dumps({**found, "said": "no CUDA device here: nothing was checked"}))
        return 0
    device = choose_device("cpu" if args.device == "cpu" else "cuda", 0, 1)
    backend = "cpu:gloo,cuda:nccl" if device.is_cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
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
    run_program(main)
