"""The KV cache of one generation instance, in blocks: what its samples want, and what memory leaves of that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhfuse.config.settings import RunConfig

CACHE_PARTS = 16  # a cache that memory limits has a whole number of these, so that few sizes are to be simulated
SPARE_BLOCKS = 1  # of a cache on a GPU, for rows of padding


@dataclass(frozen=True)
class InstanceCache:
    """`sample_tokens`: of the longest sample that is trained on; `longest_tokens`: of any, held-out ones among them;
    `samples`: of the fullest instance. `given`: blocks as configured, 0 where that is left open; then `left`: blocks
    that memory leaves, 0 where it has room for all."""

    block_tokens: int
    sample_tokens: int
    longest_tokens: int
    samples: int
    given: int = 0
    left: int = 0

    @staticmethod
    def of(config: RunConfig, instances: int) -> InstanceCache:
        """The cache of one of so many instances, before anything is known of memory."""
        rollout, prompt = config.rollout, config.data.max_prompt_tokens
        return InstanceCache(
            block_tokens=rollout.block_tokens,
            sample_tokens=prompt + rollout.max_response_tokens,
            longest_tokens=prompt + config.longest_response_tokens,
            samples=-(-config.samples_per_iteration // instances),
            given=rollout.kv_blocks_per_instance,
        )

    @property
    def wanted(self) -> int:
        """Blocks as configured, else room for every sample of the instance at full length.

        Held-out samples wait for room where they are more, but one of them must find it.
        """
        return self.given or max(self.samples * self._blocks_of(self.sample_tokens), self.least)

    @property
    def least(self) -> int:
        """Blocks without which the longest sample finds no room."""
        return self._blocks_of(self.longest_tokens)

    @property
    def blocks(self) -> int:
        return self.left or self.wanted

    def fitting(self, cache_bytes: float, missing_bytes: float) -> InstanceCache | None:
        """The cache that memory leaves where this one, `cache_bytes` on a rank, needs so many more than there are.

        None where it has room, and where its blocks are given or reduced already. The longest sample always finds room.
        Samples beyond the blocks wait, or are preempted and run again.
        """
        if self.given or self.left or missing_bytes <= 0:
            return None
        block_bytes, part = cache_bytes / self.blocks, self.blocks / CACHE_PARTS
        left = max(self.least, int((cache_bytes - missing_bytes) // block_bytes) - SPARE_BLOCKS)
        even = int(left // part * part)
        return replace(self, left=even if even >= self.least else left)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
