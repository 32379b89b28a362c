"""The forward pass that CUDA runs, run on CPU: against the CPU kernels, and its padding, graphs and memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from testkit import triton_interpreter  # noqa: F401
from testkit.gen_models import random_weights, tiny_spec
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfuse.base.errors import InputError, leave
from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import TensorParallel
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.gpu.decode_graphs import DecodeGraphs, DecodeInputs, DecodeShape, Staging, padded_arrays, padded_places
from rlhfuse.gen.gpu.draws import DrawKernels
from rlhfuse.gen.gpu.forward import DeviceForward
from rlhfuse.gen.model_runner import ModelRunner

CPU = torch.device("cpu")
WIDE = dict(context=1024, qk_norm=True, qkv_bias=True, proj_bias=True)


class Repeater:
    """Stands where the CUDA recorder stands: what it records runs again as Python, on the same tensors."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.released = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        work()  # the warm-up

        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    def release(self) -> None:
        self.released += 1


def torch_engine(spec, repeater: Repeater | None = None, dtype=torch.float32, weights=None, **options) -> Engine:
    """An engine over torch's kernels; with a repeater its decode steps are recorded and repeated."""
    weights = weights or {name: w.to(dtype) for name, w in random_weights(spec).items()}
    engine = Engine(spec, weights, EngineOptions(**({"num_blocks": 200, "kernels": "torch"} | options)), dtype=dtype)
    if repeater is not None:
        forward = engine.runner._forward
        forward._graphs = DecodeGraphs(repeater, CPU)
    return engine


@pytest.mark.parametrize(
    "ranks, register, refused", [(2, "1", True), (2, None, True), (2, "0", False), (1, None, False)]
)
def test_tensor_ranks_record_no_step_whose_replay_would_read_elsewhere(monkeypatch, ranks, register, refused):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if register:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", register)
    spec, parallel = tiny_spec(), TensorParallel(None)
    parallel.size = ranks
    built = torch_engine(spec).runner._forward
    kernels = built._kernels, built._attention, built._layer_kernels
    if refused:
        with pytest.raises(InputError, match="export NCCL_GRAPH_REGISTER=0, or set rollout.cuda_graphs=false"):
            DeviceForward(spec, parallel, CPU, 4, Repeater(), *kernels)
    else:
        assert DeviceForward(spec, parallel, CPU, 4, Repeater(), *kernels).recorded_shapes == 0
    DeviceForward(spec, parallel, CPU, 4, None, *kernels)  # nothing is recorded


def filled(engine: Engine, prompts: list[list[int]], steps: int = 3) -> ForwardBatch:
    """Run an engine until all its sequences decode; returns its last batch, which may be run again."""
    seen: list[ForwardBatch] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda batch, draws, cache: seen.append(batch) or launch(batch, draws, cache)
    for i, prompt in enumerate(prompts):
        engine.add(i, prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    for _ in range(steps):
        engine.step()
        engine.settle()
    engine.runner.launch = launch
    assert len(seen[-1].tokens) == len(prompts) == len(seen[-1].contexts)
    return seen[-1]


def greedy(rows: int) -> DrawBatch:
    none = np.zeros(rows, np.int64)
    return DrawBatch(
        np.zeros((rows, 2), np.uint32), none.astype(np.float32), none, none + 1.0, np.empty((rows, 0), int)
    )


def decoded(engine: Engine, batch: ForwardBatch, shape: DecodeShape) -> torch.Tensor:
    """Logits of the real rows of a batch, padded to `shape`."""
    cache = engine._cache
    arrays = padded_arrays(batch, greedy(len(batch.tokens)), shape, cache.keys.shape[1] - 1, cache.block_tokens)
    with torch.inference_mode():
        inputs = DecodeInputs(shape, Staging(CPU).send(arrays))
        return engine.runner._forward.decode(inputs, cache)[: len(batch.tokens)].float()


@pytest.mark.parametrize("changes", [dict(), WIDE, dict(tied_embeddings=True, kv_heads=4), dict(kv_heads=1)])
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_samples_equal_those_of_the_cpu_kernels(prompts, changes, graphs):
    spec = tiny_spec(**changes)
    # Matrices of about the size of a fresh model's: larger ones make rounding grow from layer to layer.
    weights = {name: w * 0.6 if w.ndim == 2 else w for name, w in random_weights(spec).items()}
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = Engine(spec, weights, EngineOptions(num_blocks=60)).generate(prompts, params)
    repeater = Repeater() if graphs else None
    engine = torch_engine(spec, repeater, weights=weights, num_blocks=60, max_batched_tokens=50)
    found = engine.generate(prompts, params)
    for a, b in zip(expected, found):
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-5
    assert repeater is None or repeater.replayed > repeater.recorded > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_never_changes_real_rows(prompts, dtype):
    engine = torch_engine(tiny_spec(**WIDE), dtype=dtype)
    batch = filled(engine, prompts)
    plain = decoded(engine, batch, DecodeShape(len(batch.tokens), batch.tables.shape[1]))
    scale = plain.abs().max()
    for rows, width in ((8, 16), (16, 8), (48, 64)):
        padded = decoded(engine, batch, DecodeShape(rows, width))
        # 1e-5 in float32; in bfloat16 a GEMM of other rows may round the other way, 2^-8 relative at each place
        assert (padded - plain).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-5) * max(scale, 1)


def test_padding_and_neighbours_blocks_are_never_read(prompts):
    """Whatever lies in the spare block, in free blocks and behind the ends of sequences: no bit changes."""
    engine = torch_engine(tiny_spec(**WIDE))
    batch, cache = filled(engine, prompts), engine._cache
    expected = decoded(engine, batch, DecodeShape(16, 16))
    used = torch.zeros(cache.keys.shape[1] * cache.block_tokens, dtype=torch.bool)
    for table, context in zip(batch.tables, batch.contexts):
        positions = np.arange(context - 1)  # the last is written by the step itself
        used[table[positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens] = True
    for memory in (cache.keys, cache.values):
        memory.flatten(1, 2)[:, ~used] = float("nan")
    assert torch.equal(decoded(engine, batch, DecodeShape(16, 16)), expected)


def test_padding_writes_to_the_spare_block_alone(prompts):
    engine = torch_engine(tiny_spec(**WIDE))
    batch, cache = filled(engine, prompts), engine._cache
    cache.keys.flatten(1, 2)[:, batch.slots] = 0  # as before the step that ran already
    before = cache.keys.clone()
    decoded(engine, batch, DecodeShape(32, 16))
    changed = (cache.keys != before).flatten(3).any(-1).any(0).flatten().nonzero()[:, 0].tolist()
    spare = (cache.keys.shape[1] - 1) * cache.block_tokens
    assert set(changed) == {*batch.slots.tolist(), spare}
    assert engine.scheduler.blocks.num_blocks == cache.keys.shape[1] - 1, "the spare block must not be given out"


def test_a_step_that_does_not_draw_every_row(prompts):
    """A chunk of one token decodes like the others, but its logits are not asked for."""
    engine = torch_engine(tiny_spec(**WIDE))
    batch = filled(engine, prompts)
    forward, cache = engine.runner._forward, engine._cache
    tokens, logprobs = forward.launch(batch, greedy(8), cache).read()
    some = ForwardBatch(**{**vars(batch), "draw_rows": np.array([1, 4])})
    assert forward.launch(some, greedy(2), cache).read() == ([tokens[1], tokens[4]], [logprobs[1], logprobs[4]])


def test_recording_follows_shapes_cache_and_weights(prompts):
    spec, repeater = tiny_spec(**WIDE), Repeater()
    weights = random_weights(spec)
    engine = torch_engine(spec, repeater, weights=weights)
    graphs = engine.runner._forward._graphs
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = torch_engine(spec).generate(prompts, params)
    assert engine.generate(prompts, params) == expected
    assert tuple(graphs._recorded) == (DecodeShape(8, 16),) and repeater.recorded == 1
    assert engine.runner.recording_seconds > 0
    engine.generate(prompts[:3], params)
    assert tuple(graphs._recorded) == (DecodeShape(8, 16), DecodeShape(4, 16))

    engine.load_weights(weights)  # the same memory, so what was recorded still serves
    assert engine.generate(prompts, params) == expected and repeater.recorded == 2
    fresh = {name: w.clone() for name, w in random_weights(spec, seed=5).items()}
    engine.load_weights(fresh)
    assert engine.generate(prompts, params) == torch_engine(spec, weights=fresh).generate(prompts, params)
    assert repeater.recorded == 3 and tuple(graphs._recorded) == (DecodeShape(8, 16),)

    released = repeater.released
    engine.pause()
    assert tuple(graphs._recorded) == () and repeater.released == released + 1
    engine.resume()
    engine.generate(prompts, params)
    assert repeater.recorded == 4


def test_draws_of_one_shape_do_not_reach_into_another(prompts):
    """All shapes share one buffer of draws: a row past the batch may be stale, a row of it never."""
    spec = tiny_spec(**WIDE)
    engine, plain = torch_engine(spec, Repeater()), torch_engine(spec)
    for count in (8, 3, 1, 5):
        params = [SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True) for i in range(count)]
        assert engine.generate(prompts[:count], params) == plain.generate(prompts[:count], params)


def test_seconds_of_a_step_leave_recording_out(monkeypatch, prompts):
    class Slow(Repeater):
        def record(self, work):
            torch.linalg.svd(torch.randn(300, 300))
            return super().record(work)

    engine = torch_engine(tiny_spec(**WIDE), Slow())
    engine.add(0, prompts[1], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(2):  # the first decode step records
        engine.step()
        engine.settle()
    assert 0 < engine.last_step.seconds < engine.runner.recording_seconds


def test_bfloat16_is_close_to_float32(prompts):
    spec = tiny_spec(**WIDE)
    rounded = {name: w.bfloat16() for name, w in random_weights(spec).items()}
    half = torch_engine(spec, Repeater(), torch.bfloat16, rounded)
    full = torch_engine(spec, weights={name: w.float() for name, w in rounded.items()})
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    differences = [
        abs(a.logprobs[0] - b.logprobs[0])
        for a, b in zip(half.generate(prompts, params), full.generate(prompts, params))
        if a.tokens == b.tokens
    ]
    assert len(differences) >= len(prompts) // 2 and max(differences) < 0.1


def test_unknown_kernels_are_refused():
    with pytest.raises(InputError, match="kernels='cuda' is unknown"):
        EngineOptions(kernels="cuda")


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    spec, repeater = tiny_spec(**WIDE), Repeater()
    engine = Engine(
        spec,
        random_weights(spec, tp_rank=rank, tp_size=2),
        EngineOptions(num_blocks=60, kernels="torch"),
        tp_group=dist.group.WORLD,
    )
    forward = engine.runner._forward
    forward._graphs = DecodeGraphs(repeater, CPU)
    results = engine.generate([[9, 10, 11], [12], list(range(20, 60))], SamplingParams(max_tokens=12, ignore_eos=True))
    torch.save((results, repeater.recorded, tuple(forward._graphs._recorded)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    leave(0)


def test_two_tensor_parallel_ranks_record_the_same_shapes_and_agree(tmp_path):
    mp.spawn(run_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    assert first == second and first[1] > 0
    spec = tiny_spec(**WIDE)
    whole = torch_engine(spec).generate(
        [[9, 10, 11], [12], list(range(20, 60))], SamplingParams(max_tokens=12, ignore_eos=True)
    )
    for a, b in zip(whole, first[0]):
        assert a.tokens == b.tokens
        assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_what_eager_gives(prompts, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    spec = tiny_spec(**WIDE)
    weights = {name: w.to("cuda", dtype) for name, w in random_weights(spec).items()}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    graphs, eager = (
        Engine(spec, weights, EngineOptions(num_blocks=60, cuda_graphs=on), device="cuda", dtype=dtype)
        for on in (True, False)
    )
    for _ in range(2):
        for a, b in zip(graphs.generate(prompts, params), eager.generate(prompts, params)):
            assert a.tokens == b.tokens
            assert max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs)) < 1e-3
        graphs.pause()
        graphs.resume()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_tensors_without_numbers_pass_through_so_nothing_is_read_back(monkeypatch, kernels):
    """On the meta device there are only shapes and types: reading a number back, or mixing devices, would raise."""
    meta, spec, launched = torch.device("meta"), tiny_spec(**WIDE), launches(monkeypatch)
    weights = {name: w.to(meta, torch.bfloat16) for name, w in random_weights(spec).items()}
    options = EngineOptions(max_sequences=8, kernels=kernels, attention=kernels)
    runner = ModelRunner(spec, weights, options, device=meta, dtype=torch.bfloat16)
    runner._forward._kernels = DrawKernels(lambda tokens, newest: None, lambda logits, inputs, outputs: None)
    cache = KVCache(spec.layers, 9, 256, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16, device=meta)
    with torch.inference_mode():
        logits = runner._forward.decode(DecodeInputs.empty(DecodeShape(4, 8), meta), cache)
    assert logits.shape == (4, spec.vocab) and logits.dtype == torch.float32 and logits.is_meta
    three = np.arange(3)
    batch = ForwardBatch(three, three, three, np.array([0, 3]), np.array([300]), np.zeros((1, 2), np.int32), three[2:])
    with torch.inference_mode():
        logits, inputs = runner._forward.mixed(batch, greedy(1), cache)
    assert inputs.rows == 1
    assert logits.shape == (1, spec.vocab) and logits.dtype == torch.float32 and logits.is_meta
    assert len(launched) == (11 * spec.layers + 2 if kernels == "triton" else 0)


def launches(monkeypatch) -> list[str]:
    """Names of Triton kernels, in the order in which they would be launched from now on; nothing runs."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: found.append(self.fn.__name__))
    return found


class Operators(TorchDispatchMode):
    """Counts what torch launches: every operator but those that only look at memory or take it."""

    LOOKS = {
        "flatten",
        "chunk",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "select",
        "slice",
        "split",
        "unsqueeze",
        "detach",
        "reshape",
    }
    TAKES = {"empty", "empty_like", "new_empty"}

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.LOOKS | self.TAKES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [dict(), WIDE])
def test_a_decode_layer_is_nine_launches(monkeypatch, changes):
    """On CUDA the same functions are called; a product is one launch."""
    names, meta = launches(monkeypatch), torch.device("meta")

    def step(layers: int) -> list[str]:
        spec = tiny_spec(layers=layers, **changes)
        weights = {name: w.to(meta, torch.bfloat16) for name, w in random_weights(spec).items()}
        options = EngineOptions(max_sequences=8, kernels="triton", attention="triton")
        runner = ModelRunner(spec, weights, options, device=meta, dtype=torch.bfloat16)
        cache = KVCache(layers, 9, 16, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16, device=meta)
        inputs = DecodeInputs.empty(DecodeShape(4, 16), meta)
        runner._forward._kernels = DrawKernels(lambda tokens, newest: None, lambda logits, inputs, outputs: None)
        names.clear()
        with torch.inference_mode(), Operators(names):
            runner._forward.decode(inputs, cache)
        return list(names)

    one, three = step(1), step(3)
    product = one[one.index("_add_norm_kernel") + 1]
    layer = ["_add_norm_kernel", product, "_place_heads_kernel", "_decode_kernel", product]
    layer += ["_add_norm_kernel", product, "_swiglu_kernel", product]
    first = one.index("_add_norm_kernel")
    assert product in ("linear", "mm", "addmm") and [*map(plain, one[first : first + 9])] == [*map(plain, layer)]
    assert [*map(plain, three)] == [*map(plain, one[:first] + 3 * layer + one[first + 9 :])] and len(layer) == 9


def plain(name: str) -> str:
    return "product" if name in ("linear", "mm", "addmm") else name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [WIDE, dict(tied_embeddings=True, kv_heads=4)])
def test_triton_computes_what_torch_computes(changes, dtype):
    """Both kinds of steps in the interpreter: a prefill with a chunk among decoding sequences, and decodes."""
    spec = tiny_spec(**changes)
    weights = {name: (w * 0.6 if w.ndim == 2 else w).to(dtype) for name, w in random_weights(spec).items()}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[9, 10, 11], [12], list(range(20, 60))]
    torchs, tritons = (
        torch_engine(spec, dtype=dtype, weights=weights, num_blocks=30, max_batched_tokens=24, **chosen)
        for chosen in (dict(kernels="torch"), dict(kernels="triton", attention="triton"))
    )
    assert tritons.runner.lines == ("attention of generation: triton",)
    expected, found = torchs.generate(prompts, params), tritons.generate(prompts, params)
    if dtype == torch.float32:
        assert [a.tokens for a in expected] == [b.tokens for b in found]
    limit = 1e-5 if dtype == torch.float32 else 0.1
    for a, b in zip(expected, found):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), len(a.tokens))
        assert same and max(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same])) < limit


def test_an_unknown_attention_is_refused():
    with pytest.raises(InputError, match="attention='flash' is unknown; use one of auto, flashinfer, triton"):
        EngineOptions(attention="flash")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_guesses_are_verified_in_a_decode_step_of_several_queries(prompts, kernels):
    """Recorded like any decode step: logits are those of a mixed step over the same tokens, ragged ones padded."""
    engine = torch_engine(tiny_spec(**WIDE), max_sequences=8, attention=kernels, draft_rows=32)
    engine.drafter = None  # these are chosen here
    filled(engine, prompts[:5])
    scheduler, forward, cache = engine.scheduler, engine.runner._forward, engine._cache
    guesses = [[3, 4, 5], [], [7], [9, 10], [11]]
    scheduled = scheduler.add_guesses(scheduler.schedule(), guesses)
    batch = ForwardBatch.of(scheduled, scheduler.table, cache.block_tokens)
    assert batch.guesses.tolist() == [3, 4, 5, -1, -1, 7, -1, 9, 10, -1, 11, -1]
    draws = greedy(len(batch.tokens))
    wanted, _ = forward.mixed(batch, draws, cache)
    shape = DecodeShape(8, 16, queries=4)
    arrays = padded_arrays(batch, draws, shape, cache.keys.shape[1] - 1, cache.block_tokens)
    with torch.inference_mode():
        found = forward.decode(DecodeInputs(shape, Staging(CPU).send(arrays)), cache)[padded_places(batch, shape)]
    assert (found - wanted).abs().max() < 1e-5 * max(1, wanted.abs().max())
    repeater = Repeater()
    forward._graphs = DecodeGraphs(repeater, CPU)
    drawn = forward.launch(batch, draws, cache).read()
    assert drawn.tokens == wanted.argmax(-1).tolist() and tuple(forward._graphs._recorded) == (shape,)
