"""One engine under measurement, alone in its process; generation.py asks it over a pipe.

    generate    prompts with forced lengths, so many at a time -> seconds

Runs in the environment of the engine it measures: only that engine is imported, and nothing of rlhfuse for others.
"""

from __future__ import annotations

import time
from typing import Any

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
