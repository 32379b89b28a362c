"""The forward pass that CUDA runs, run on CPU: against the CPU kernels, and its padding, graphs and memory."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from testkit import triton_interpreter  # noqa: F401
from testkit.gen_models import PROMPTS, add_all, assert_near, engine_of, random_weights, tiny_spec
from testkit.recorded_decode import CPU, WIDE, Repeater, torch_engine
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfuse.base.errors import InputError
from rlhfuse.config.spec import ModelSpec
from rlhfuse.gen.core.draws import DrawBatch
from rlhfuse.gen.core.forward_batch import ForwardBatch
from rlhfuse.gen.core.kv_cache import KVCache
from rlhfuse.gen.core.model_shard import ModelWeights, TensorParallel
from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams
from rlhfuse.gen.forward import choose_forward
from rlhfuse.gen.gpu.decode_graphs import DecodeInputs, DecodeShape, Staging, padded_arrays
from rlhfuse.gen.gpu.draws import DrawKernels
from rlhfuse.gen.gpu.forward import DeviceForward

POOL_RANKS = 2
TIED = tiny_spec(tied_embeddings=True, kv_heads=4)
META = torch.device("meta")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
THREE = [[9, 10, 11], [12], list(range(20, 60))]


def damped(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Matrices of about the size of a fresh model's: larger ones make rounding grow from layer to layer."""
    return {name: (w * 0.6 if w.ndim == 2 else w).to(dtype) for name, w in random_weights(spec).items()}


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
    built = torch_engine(spec=spec).forward
    kernels = built._kernels, built._attention, built._layer_kernels
    if refused:
        with pytest.raises(InputError, match="export NCCL_GRAPH_REGISTER=0, or set rollout.cuda_graphs=false"):
            DeviceForward(spec, parallel, CPU, 4, Repeater(), *kernels)
    else:
        assert DeviceForward(spec, parallel, CPU, 4, Repeater(), *kernels).recorded_shapes == 0
    DeviceForward(spec, parallel, CPU, 4, None, *kernels)  # nothing is recorded


def filled(engine: Engine, prompts: list[list[int]] = PROMPTS, steps: int = 3) -> ForwardBatch:
    """Run an engine until all its sequences decode; returns its last batch, which may be run again."""
    seen: list[ForwardBatch] = []
    launch = engine.forward.launch
    engine.forward.launch = lambda batch, draws, cache: seen.append(batch) or launch(batch, draws, cache)
    add_all(engine, prompts, replace(GREEDY, max_tokens=100))
    for _ in range(steps):
        engine.step()
        engine.settle()
    engine.forward.launch = launch
    assert len(seen[-1].tokens) == len(prompts) == len(seen[-1].contexts)
    return seen[-1]


def greedy(rows: int) -> DrawBatch:
    none, nowhere = np.zeros(rows, np.int64), np.empty((rows, 0), int)
    return DrawBatch(np.zeros((rows, 2), np.uint32), none.astype(np.float32), none, none + 1.0, nowhere)


def decoded(engine: Engine, batch: ForwardBatch, shape: DecodeShape) -> torch.Tensor:
    """Logits of the real rows of a batch, padded to `shape`."""
    cache = engine._cache
    arrays = padded_arrays(batch, greedy(len(batch.tokens)), shape, cache.keys.shape[1] - 1, cache.block_tokens)
    with torch.inference_mode():
        inputs = DecodeInputs(*Staging(CPU).send(arrays))
        return engine.forward.decode(inputs, cache)[: len(batch.tokens)].float()


@pytest.mark.parametrize("spec", [tiny_spec(), WIDE, TIED, tiny_spec(kv_heads=1)], ids=["plain", "wide", "tied", "one"])
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_samples_equal_those_of_the_cpu_kernels(spec, graphs):
    weights, params = damped(spec), replace(GREEDY, max_tokens=24)
    repeater = Repeater() if graphs else None
    engine = torch_engine(repeater, spec, weights=weights, num_blocks=60, max_batched_tokens=50)
    assert_near(engine.generate(PROMPTS, params), engine_of(spec, weights).generate(PROMPTS, params))
    assert repeater is None or repeater.replayed > repeater.recorded > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_never_changes_real_rows(dtype):
    engine = torch_engine(dtype=dtype)
    batch = filled(engine)
    plain = decoded(engine, batch, DecodeShape(len(batch.tokens), batch.tables.shape[1]))
    scale = plain.abs().max()
    for rows, width in ((8, 16), (16, 8), (48, 64)):
        padded = decoded(engine, batch, DecodeShape(rows, width))
        # 1e-5 in float32; in bfloat16 a GEMM of other rows may round the other way, 2^-8 relative at each place
        assert (padded - plain).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-5) * max(scale, 1)


def test_padding_and_neighbours_blocks_are_never_read():
    """Whatever lies in the spare block, in free blocks and behind the ends of sequences: no bit changes."""
    engine = torch_engine()
    batch, cache = filled(engine), engine._cache
    assert engine.scheduler.blocks.num_blocks == cache.keys.shape[1] - 1, "the spare block must not be given out"
    expected = decoded(engine, batch, DecodeShape(16, 16))
    used = torch.zeros(cache.keys.shape[1] * cache.block_tokens, dtype=torch.bool)
    for table, context in zip(batch.tables, batch.contexts):
        positions = np.arange(context - 1)  # the last is written by the step itself
        used[table[positions // cache.block_tokens] * cache.block_tokens + positions % cache.block_tokens] = True
    for memory in (cache.keys, cache.values):
        memory.flatten(1, 2)[:, ~used] = float("nan")
    assert torch.equal(decoded(engine, batch, DecodeShape(16, 16)), expected)


def test_a_step_that_does_not_draw_every_row():
    """A chunk of one token decodes like the others, but its logits are not asked for."""
    engine = torch_engine()
    batch = filled(engine)
    forward, cache = engine.forward, engine._cache
    tokens, logprobs, unmeasured = forward.launch(batch, greedy(8), cache).read()
    some = ForwardBatch(**{**vars(batch), "draw_rows": np.array([1, 4])})
    assert forward.launch(some, greedy(2), cache).read() == (
        [tokens[1], tokens[4]],
        [logprobs[1], logprobs[4]],
        unmeasured,
    )


def test_recording_follows_shapes_cache_and_weights():
    repeater, weights = Repeater(), random_weights(WIDE)
    engine = torch_engine(repeater, weights=weights)
    graphs = engine.forward._graphs
    expected = torch_engine().generate(PROMPTS, GREEDY)
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert tuple(graphs._recorded) == (DecodeShape(8, 16),) and repeater.recorded == 1
    engine.generate(PROMPTS[:3], GREEDY)
    assert tuple(graphs._recorded) == (DecodeShape(8, 16), DecodeShape(4, 16))

    engine.load_weights(weights)  # the same memory, so what was recorded still serves
    assert engine.generate(PROMPTS, GREEDY) == expected and repeater.recorded == 2
    fresh = random_weights(WIDE, seed=5)
    engine.load_weights(fresh)
    assert engine.generate(PROMPTS, GREEDY) == torch_engine(weights=fresh).generate(PROMPTS, GREEDY)
    assert repeater.recorded == 3 and tuple(graphs._recorded) == (DecodeShape(8, 16),)


def test_draws_of_one_shape_do_not_reach_into_another():
    """All shapes share one buffer of draws: a row past the batch may be stale, a row of it never."""
    engine, plain = torch_engine(Repeater()), torch_engine()
    for count in (8, 3, 1, 5):
        params = [SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True) for i in range(count)]
        assert engine.generate(PROMPTS[:count], params) == plain.generate(PROMPTS[:count], params)


def test_seconds_of_a_step_leave_recording_out(monkeypatch):
    """On a clock that recording moves by 100 and the work of a step by 1."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Repeater):
        def record(self, work):
            now[0] += 100
            return super().record(work)

    engine = torch_engine(Slow())
    launch = engine.forward.launch
    engine.forward.launch = lambda *batch: now.append(now.pop() + 1) or launch(*batch)
    engine.add(0, PROMPTS[1], GREEDY)
    for recorded in (0, 100):  # the first decode step records
        engine.step()
        engine.settle()
        assert engine.last_step.seconds == pytest.approx(1) and engine.forward.recording_seconds == recorded


def on_rank(rank: int) -> tuple:
    repeater = Repeater()
    engine = torch_engine(repeater, tp_group=dist.group.WORLD)
    results = engine.generate(THREE, SamplingParams(max_tokens=12, ignore_eos=True))
    return results, repeater.recorded, tuple(engine.forward._graphs._recorded)


def test_two_tensor_parallel_ranks_record_the_same_shapes_and_agree(workers):
    first, second = workers.run(on_rank)
    assert first == second and first[1] > 0
    assert_near(first[0], torch_engine().generate(THREE, SamplingParams(max_tokens=12, ignore_eos=True)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_what_eager_gives(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    weights = {name: w.to("cuda", dtype) for name, w in random_weights(WIDE).items()}
    graphs, eager = (
        Engine(WIDE, weights, EngineOptions(num_blocks=60, cuda_graphs=on), device="cuda", dtype=dtype)
        for on in (True, False)
    )
    for _ in range(2):
        params = replace(GREEDY, max_tokens=20)
        assert_near(graphs.generate(PROMPTS, params), eager.generate(PROMPTS, params), 1e-3)
        graphs.pause()
        graphs.resume()


def meta_forward(spec: ModelSpec, kernels: str) -> DeviceForward:
    """One without numbers, whose draws do nothing."""
    weights = {name: w.to(META, torch.bfloat16) for name, w in random_weights(spec).items()}
    options = EngineOptions(max_sequences=8, kernels=kernels, attention=kernels)
    forward, _ = choose_forward(spec, options, META, torch.bfloat16, None)
    forward.bind(ModelWeights.take(weights, spec, 1, torch.bfloat16, META))
    forward._kernels = DrawKernels(lambda tokens, newest: None, lambda logits, inputs, outputs: None)
    return forward


def meta_cache(spec: ModelSpec, block_tokens: int) -> KVCache:
    sizes = spec.layers, 9, block_tokens, spec.kv_heads, spec.head_dim
    return KVCache(*sizes, dtype=torch.bfloat16, device=META)


def inputs_without_numbers(shape: DecodeShape) -> DecodeInputs:
    sizes = (3, shape.rows), (shape.draws, shape.rows), (shape.rows,), (shape.rows, shape.width)
    return DecodeInputs(*(torch.empty(size, dtype=torch.int32, device=META) for size in sizes))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_tensors_without_numbers_pass_through_so_nothing_is_read_back(monkeypatch, kernels):
    """On the meta device there are only shapes and types: reading a number back, or mixing devices, would raise."""
    launched = launches(monkeypatch)
    forward, cache = meta_forward(WIDE, kernels), meta_cache(WIDE, 256)
    three = np.arange(3)
    batch = ForwardBatch(three, three, three, np.array([0, 3]), np.array([300]), np.zeros((1, 2), np.int32), three[2:])
    with torch.inference_mode():
        decoded = forward.decode(inputs_without_numbers(DecodeShape(4, 8)), cache)
        mixed, inputs = forward.mixed(batch, greedy(1), cache)
    assert inputs.rows == 1
    for logits, rows in ((decoded, 4), (mixed, 1)):
        assert logits.shape == (rows, WIDE.vocab) and logits.dtype == torch.float32 and logits.is_meta
    assert len(launched) == (11 * WIDE.layers + 2 if kernels == "triton" else 0)


def launches(monkeypatch) -> list[str]:
    """Names of Triton kernels, in the order in which they would be launched from now on; nothing runs."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *_, **__: found.append(self.fn.__name__))
    return found


class Operators(TorchDispatchMode):
    """Counts what torch launches: every operator but those that only look at memory or take it."""

    LOOKS = set("flatten chunk view _unsafe_view t transpose select slice split unsqueeze detach reshape".split())
    TAKES = {"empty", "empty_like", "new_empty"}

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.LOOKS | self.TAKES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", [tiny_spec(), WIDE], ids=["plain", "wide"])
def test_a_decode_layer_is_nine_launches(monkeypatch, spec):
    """On CUDA the same functions are called; a product is one launch."""
    names = launches(monkeypatch)

    def step(layers: int) -> list[str]:
        shape = replace(spec, layers=layers)
        forward, inputs = meta_forward(shape, "triton"), inputs_without_numbers(DecodeShape(4, 16))
        names.clear()
        with torch.inference_mode(), Operators(names):
            forward.decode(inputs, meta_cache(shape, 16))
        return ["product" if name in ("linear", "mm", "addmm") else name for name in names]

    one, three = step(1), step(3)
    first = one.index("add_norm_kernel")
    layer = ["add_norm_kernel", "product", "place_heads_kernel", "_decode_kernel", "product"]
    layer += ["add_norm_kernel", "product", "swiglu_kernel", "product"]
    assert one[first : first + 9] == layer and three == one[:first] + 3 * layer + one[first + 9 :]


@pytest.mark.parametrize(
    "spec, dtype",
    [
        (WIDE, torch.float32),
        pytest.param(TIED, torch.bfloat16, marks=pytest.mark.ci),
        pytest.param(WIDE, torch.bfloat16, marks=pytest.mark.ci),
        pytest.param(TIED, torch.float32, marks=pytest.mark.ci),
    ],
    ids=["wide", "tied-bfloat16", "wide-bfloat16", "tied"],
)
def test_triton_computes_what_torch_computes(spec, dtype):
    """Both kinds of steps in the interpreter: a prefill with a chunk among decoding sequences, and decodes."""
    sizes = dict(dtype=dtype, weights=damped(spec, dtype), num_blocks=30, max_batched_tokens=24)
    torchs, tritons = (
        torch_engine(spec=spec, **sizes, **chosen)
        for chosen in (dict(kernels="torch"), dict(kernels="triton", attention="triton"))
    )
    assert tritons.lines == ("attention of generation: triton",)
    expected, found = (engine.generate(THREE, replace(GREEDY, max_tokens=4)) for engine in (torchs, tritons))
    if dtype == torch.float32:
        assert_near(found, expected)
    for a, b in zip(expected, found):
        same = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens)) if x != y), len(a.tokens))
        assert same and max(abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same])) < 0.1
