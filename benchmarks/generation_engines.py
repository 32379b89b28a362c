"""One engine under measurement, alone in its process; generation.py asks it over a pipe.

    generate    prompts with forced lengths, so many at a time -> seconds
    decode      all prompts at once, each step timed           -> seconds of a step when all of them decode

Runs in the environment of the engine it measures: only that engine is imported, and nothing of rlhfuse for others.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

ROW = 4096  # elements, of the matrix read to measure the memory
SPARE = 200  # tokens that the first sequence may draw while others of `decode` are still in their prompts

GREEDY = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}  # of transformers
Prompts = list[list[int]]


class Measured:
    """An engine in this process."""

    version: str

    def facts(self) -> tuple[str, int]:
        """Version and threads."""
        import torch

        return self.version, torch.get_num_threads()


class Vllm(Measured):
    """`configuration`: arguments of vllm.LLM. The size of its cache is in the environment, where vLLM looks for it."""

    def __init__(self, model: str, context: int, max_sequences: int, configuration: dict[str, Any], **_: Any) -> None:
        import vllm

        self.version = vllm.__version__
        self._asked = 0
        self._params = vllm.SamplingParams
        self._delta = vllm.sampling_params.RequestOutputKind.DELTA
        self._llm = vllm.LLM(
            model,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=context,
            max_num_seqs=max_sequences,
            **configuration,
        )

    def generate(
        self, prompts: Prompts, lengths: list[int], at_once: int, seed: int, greedy: bool = False
    ) -> dict[str, Any]:
        params = [self._param(length, temperature=float(not greedy)) for length in lengths]
        start = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert made == sum(lengths), f"{made} tokens of {sum(lengths)}"
        return {"seconds": seconds}

    def decode(self, prompts: Prompts, steps: int, seed: int) -> dict[str, Any]:
        engine = self._llm.llm_engine
        self._asked += 1  # part of the ids: an engine process of its own may still answer for aborted requests
        ids = [f"{self._asked}-{i}" for i in range(len(prompts))]
        for name, prompt in zip(ids, prompts):
            engine.add_request(name, {"prompt_token_ids": prompt}, self._param(steps + SPARE, output_kind=self._delta))
        decoding: set[str] = set()
        while len(decoding) < len(ids):
            decoding |= {output.request_id for output in engine.step()}
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            ran = engine.step()
            times.append(time.perf_counter() - start)
            assert len(ran) == len(ids), f"{len(ran)} of {len(ids)} sequences decoded"
        engine.abort_request([output.request_id for output in ran])
        return {"seconds": statistics.median(times)}

    def _param(self, length: int, **more: Any) -> Any:
        return self._params(
            **{"temperature": 1.0, "max_tokens": length, "ignore_eos": True, "detokenize": False} | more
        )


class Transformers(Measured):
    """`configuration`: attn_implementation of the model, whether to compile it, and the rest goes to generate.

    More requests than `at_once` run in static batches, each as long as its longest sequence.
    """

    def __init__(self, model: str, configuration: dict[str, Any], **_: Any) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        self.version = transformers.__version__
        options = dict(configuration)
        attention = options.pop("attn_implementation")
        if options.pop("compile", False):
            options["compile_config"] = transformers.CompileConfig(mode="default")
            options["compile_config"]._compile_all_devices = True  # or generate() compiles on GPUs alone
        self._torch, self._options = torch, options
        self._criterion = transformers.StoppingCriteriaList
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(
        self, prompts: Prompts, lengths: list[int], at_once: int, seed: int, greedy: bool = False
    ) -> dict[str, Any]:
        self._torch.manual_seed(seed)
        start = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            asked = lengths[first : first + at_once]
            batch = self._torch.tensor(prompts[first : first + at_once])
            output = self._sample(batch, max(asked), **GREEDY if greedy else {})
            assert output.shape[1] == batch.shape[1] + max(asked), f"{list(output.shape)}: ended early"
        return {"seconds": time.perf_counter() - start}

    def decode(self, prompts: Prompts, steps: int, seed: int) -> dict[str, Any]:
        self._torch.manual_seed(seed)
        times: list[float] = []

        def note(input_ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(len(input_ids), dtype=self._torch.bool)

        self._sample(self._torch.tensor(prompts), steps + 1, stopping_criteria=self._criterion([note]))
        assert len(times) == steps + 1, f"{len(times)} steps"
        return {"seconds": statistics.median(b - a for a, b in zip(times, times[1:]))}

    def _sample(self, batch: Any, length: int, **more: Any) -> Any:
        with self._torch.inference_mode():
            return self._model.generate(
                batch,
                attention_mask=self._torch.ones_like(batch),
                max_new_tokens=length,
                **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | self._options | more,
            )


class Rlhfuse(Measured):
    """This project's engine. `configuration`: fields of EngineOptions but num_blocks and max_sequences."""

    def __init__(
        self, model: str, max_sequences: int, cache_tokens: int, configuration: dict[str, Any], **_: Any
    ) -> None:
        from rlhfuse.gen.engine import Engine, EngineOptions, SamplingParams

        options = dict(configuration)
        num_blocks = -(-cache_tokens // options["block_tokens"]) + max_sequences
        self.version = "this checkout"
        self._params = SamplingParams
        self._engine = Engine.from_pretrained(
            model, EngineOptions(num_blocks=num_blocks, max_sequences=max_sequences, **options)
        )

    def generate(
        self, prompts: Prompts, lengths: list[int], at_once: int, seed: int, greedy: bool = False
    ) -> dict[str, Any]:
        sampling = dict(ignore_eos=True, seed=seed, temperature=float(not greedy), logprobs=False)  # as of the others
        params = [self._params(max_tokens=length, **sampling) for length in lengths]
        start = time.perf_counter()
        results = self._engine.generate(prompts, params)
        seconds, made = time.perf_counter() - start, sum(len(result.tokens) for result in results)
        assert made == sum(lengths), f"{made} tokens of {sum(lengths)}"
        return {"seconds": seconds}

    def decode(self, prompts: Prompts, steps: int, seed: int) -> dict[str, Any]:
        return {"seconds": statistics.median(self._decoding(prompts, steps, seed))}

    def _decoding(self, prompts: Prompts, steps: int, seed: int) -> list[float]:
        """Seconds of `steps` steps in which all prompts decode."""
        engine = self._engine
        for sample_id, prompt in enumerate(prompts):
            most = min(steps + SPARE, engine.spec.context - len(prompt))
            engine.add(sample_id, prompt, self._params(max_tokens=most, ignore_eos=True, seed=seed))
        while True:
            finished = engine.step()
            assert not finished, f"{len(prompts)} prompts did not decode together within {SPARE} tokens"
            if engine.last_step.batch == len(prompts) and engine.last_step.prefill_tokens == 0:
                break
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
            assert engine.last_step.batch == len(prompts), f"{engine.last_step.batch} of {len(prompts)} decoded"
        for sample_id in range(len(prompts)):
            engine.abort(sample_id)
        return times


class Limits(Measured):
    """What the machine allows, by torch alone: the matrix products of a step, the GEMM rate, the memory bandwidth."""

    def __init__(self, **_: Any) -> None:
        import torch

        self.version = torch.__version__
        self._torch = torch

    def products(self, shapes: list[tuple[int, int]], rows: int, repeats: int, seed: int) -> dict[str, Any]:
        """Seconds of x[rows, k] @ w[n, k]^T over all shapes (n, k), each with weights of its own."""
        torch = self._torch
        generator = torch.Generator().manual_seed(seed)
        products = [
            (
                torch.randn(rows, k, generator=generator),
                torch.randn(n, k, generator=generator).t(),
                torch.empty(rows, n),
            )
            for n, k in shapes
        ]
        times = []
        with torch.inference_mode():
            for _ in range(repeats):
                start = time.perf_counter()
                for x, w, out in products:
                    torch.mm(x, w, out=out)
                times.append(time.perf_counter() - start)
        return {"step_seconds": statistics.median(times)}

    def machine(self, buffers: list[int], gemm_size: int, repeats: int) -> dict[str, Any]:
        """Bytes per second of reading buffers of these sizes, and operations per second of one large square product.

        The best of several, with all threads. A buffer is read by its sum and by a matrix-vector product.
        """
        torch = self._torch
        rates = []
        for size in buffers:
            matrix = torch.ones(size // 4 // ROW, ROW)
            vector, out = torch.ones(ROW), torch.empty(len(matrix))
            reads = (matrix.sum, lambda: torch.mv(matrix, vector, out=out))
            seconds = min(self._timed(read) for read in reads for _ in range(repeats))
            rates.append(4 * matrix.numel() / seconds)
        a, b = torch.rand(2, gemm_size, gemm_size)
        out = torch.empty(gemm_size, gemm_size)
        seconds = min(self._timed(lambda: torch.mm(a, b, out=out)) for _ in range(repeats))
        return {"bytes_per_second": rates, "flops_per_second": 2 * gemm_size**3 / seconds}

    @staticmethod
    def _timed(call: Any) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
