"""Key-value cache: the tokens and requests that fit into a size of memory.

The same arithmetic as vLLM's, which gives out the cache in blocks
(https://arxiv.org/abs/2309.06180; vllm/v1/kv_cache_interface.py, v1/core/kv_cache_utils.py). Layers
of several kinds form groups of as many layers each; a block holds some tokens for one group, and a
request takes the blocks that each group needs for it.
"""

from dataclasses import dataclass

from app.provisioning.sizing.facts import CacheLayers, ModelFacts

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The cache of a model on one of `gpus` GPUs that share a stage of it.

    `element_bytes`: of one element. `in_flight`: tokens that may be in progress at a time, whose
    places behind a sliding window are not free yet. `block_tokens`: tokens of a block. `stages`: parts
    of the layers; the one with the most layers counts.
    """

    facts: ModelFacts
    gpus: int
    element_bytes: int
    in_flight: int
    block_tokens: int = BLOCK_TOKENS
    stages: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers of the stage, windows aside."""
        return sum(
            -(-layers.count // self.stages) * self._layer_bytes(layers)
            for layers in self.facts.cache
        )

    def request_bytes(self, context: int) -> int:
        return self._blocks(context) * self._block_bytes

    def requests(self, memory: int, context: int) -> float:
        """Number of requests of `context` tokens that fit into `memory` bytes at the same time."""
        blocks = max(0, memory) // self._block_bytes
        return blocks / self._blocks(context)

    def tokens(self, memory: int, context: int) -> int:
        """Tokens in the cache when it is full of such requests: vLLM's "KV cache size"."""
        return int(self.requests(memory, context) * context)

    # No known family has layers of different sizes; the widest counts.

    @property
    def _block_bytes(self) -> int:
        widest = max(self._layer_bytes(layers) for layers in self.facts.cache)
        # vLLM forms the groups of all layers, and spreads the layers of each over the stages.
        return -(-self._group_size // self.stages) * widest * self.block_tokens

    @property
    def _group_size(self) -> int:
        counts = [layers.count for layers in self.facts.cache]
        return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)

    def _blocks(self, context: int) -> int:
        return sum(
            -(-layers.count // self._group_size) * self._group_blocks(layers.window, context)
            for layers in self.facts.cache
        )

    def _group_blocks(self, window: int | None, context: int) -> int:
        if window is None:
            return -(-context // self.block_tokens)
        held = min(window - 1 + self.in_flight, context)
        return -(-held // self.block_tokens) + 1  # a window may begin inside a block

    def _layer_bytes(self, layers: CacheLayers) -> int:
        """Bytes of one token in one layer. GPUs share the heads; each GPU holds the indivisible parts."""
        heads = max(1, layers.kv_heads // self.gpus)
        return heads * layers.head_elements * self.element_bytes
