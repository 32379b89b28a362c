"""What the kernels of this project move and launch beside matrix products and attention, on GPUs and on a CPU.

Bytes of one layer and token on one rank: H hidden (on each tensor rank whole, or its part under sequence parallelism),
A and K the width of queries and of keys, M the MLP's, E bytes of an element; A, K and M are cut by tp.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfuse.config.spec import HardwareSpec, ModelSpec
from rlhfuse.costs.model_memory import GRADIENT_BYTES


@dataclass(frozen=True)
class Kernels:
    """Counts of reads and writes; each kernel reads and writes its operands once.

                 forward                                      backward
    two norms    4 H: input, output each                      6 H: gradient, input, gradient of it each
    two sums     6 H: residual, branch, sum each              6 H: the residual's gradient is summed alike
    rotation     2 (A + K): in and out                        2 (A + K)
    attention    2 A + 2 K: q, k, v, output                   4 A + 4 K: these four and their gradients
    SwiGLU       3 M: gate, up, product                       5 M: gradient, gate, up, and gradients of both

    The product that makes a weight gradient adds it to the float32 sum: it reads and writes that beside its operands.
    """

    gradient_sum_bytes: int = 8  # per parameter and micro-batch
    adam_bytes: int = 34  # per parameter of its ZeRO-1 share: gradient's norm 4, step 7 x 4, bfloat16 weight 2
    zero_bytes: int = 4  # per parameter: gradients set to zero
    tile_forward_bytes: int = 8  # per logit: a tile in float32, written and read
    tile_backward_bytes: int = 10  # per logit: read once more, its gradient written and read by two products
    head_gradient_sum_bytes: int = 8  # per weight of the output layer and chunk
    head_chunk_bytes: int = GRADIENT_BYTES  # of a chunk's gradient of logits
    sampler_bytes: int = 8  # per logit: float32, written by the output layer, read by the sampler
    # Recording a decode step as a CUDA graph: before it the device is waited for and cached memory given back. Another
    # engine's log has 0.05 s a shape (vLLM, pull request 22897).
    layer_launches: int = 9  # of a decode step
    step_launches: int = 6  # beside the layers: tokens fed, indices, embedding, final norm, logits, draws
    recording_seconds: float = 0.03  # of a shape, beside its launches
    switch_sums: bool = True  # where the hardware has them
    logits_products: int = 1  # of the same logits: 2 where a token's loss depends on others
    gradients_ahead: bool = True  # those of the output layer are made in the forward

    @staticmethod
    def on(hardware: HardwareSpec, switch_sums: bool, by_token: bool = True) -> Kernels:
        """Those that run there, of a loss `by_token` or not."""
        if not hardware.device.recorded_steps:
            return CPU_KERNELS
        return Kernels(switch_sums=switch_sums, logits_products=1 if by_token else 2)

    def capture_seconds(self, spec: ModelSpec, tp: int, launch_seconds: float) -> float:
        """Seconds to record one shape; over tensor ranks a layer has two sums more, and the step two."""
        sums = 2 if tp > 1 else 0
        launches = spec.layers * (self.layer_launches + sums) + self.step_launches + sums
        return self.recording_seconds + launches * launch_seconds

    def forward_bytes(self, spec: ModelSpec, hidden: float, tp: int, element_bytes: int) -> float:
        queries, keys = spec.heads * spec.head_dim / tp, spec.kv_heads * spec.head_dim / tp
        return element_bytes * (10 * hidden + 4 * queries + 4 * keys + 3 * spec.mlp / tp)

    def remade_bytes(self, spec: ModelSpec, hidden: float, tp: int, element_bytes: int) -> float:
        """Those of a forward's norms and SwiGLU."""
        return element_bytes * (4 * hidden + 3 * spec.mlp / tp)

    def backward_bytes(self, spec: ModelSpec, hidden: float, tp: int, element_bytes: int) -> float:
        queries, keys = spec.heads * spec.head_dim / tp, spec.kv_heads * spec.head_dim / tp
        return element_bytes * (12 * hidden + 6 * queries + 6 * keys + 5 * spec.mlp / tp)

    def table_gradient_bytes(self, spec: ModelSpec, tokens: float, tp: int, element_bytes: int) -> float:
        """Those of the embedding's gradient, which is dense: zeroed, rows of all tokens added to it, and it to the
        float32 sum."""
        weights, rows = spec.embedding_parameters / tp, tokens * spec.hidden
        return weights * (2 * element_bytes + 8) + 3 * rows * element_bytes


# A CPU keeps whole logits in float32, records no graph, and draws while the output layer's rows are in its cache. Bytes
# of a logit are what they take there at `HardwareSpec.moved_share` of the memory's bandwidth.
CPU_KERNELS = Kernels(
    gradient_sum_bytes=0,
    tile_forward_bytes=20,
    tile_backward_bytes=10,
    head_gradient_sum_bytes=0,
    sampler_bytes=0,
    layer_launches=0,
    step_launches=0,
    recording_seconds=0.0,
    switch_sums=False,
    gradients_ahead=False,
)
