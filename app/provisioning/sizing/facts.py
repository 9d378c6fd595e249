"""Facts of a model: counts of elements, before any choice of GPU or type."""

from dataclasses import dataclass

GIB = 1 << 30

# Bytes of an element, under the names that config.json uses.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class PlanError(Exception):
    """The input is invalid for the calculation; the message is one line that names the member."""


@dataclass(frozen=True, slots=True)
class CacheLayers:
    """Layers whose cache has one shape.

    `head_elements` are the elements that a key-value head keeps of one token: its key and its
    value, or, where `is_latent` (MLA), the one compressed vector that all heads share. `window` is
    the number of tokens that a sliding window sees; None: all.
    """

    count: int
    kv_heads: int
    head_elements: int
    window: int | None = None
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """Compression of weights.

    `bits` of a compressed weight count its share of the scales. `only_experts`: else all linear
    layers are compressed; embeddings, the output head, norms and routers never are. `group` weights
    share a scale, and no GPU may have a part of a group. `capability` is the least compute
    capability that vLLM requires.
    """

    method: str
    bits: float
    group: int = 1
    only_experts: bool = False
    capability: tuple[int, int] = (7, 0)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model by its config.json. All sizes are of the whole model."""

    model_type: str
    is_known: bool  # else the count is the generic transformer's
    is_exact: bool  # the whole checkpoint: no part left out, no quantization unknown
    parameters: int
    active_parameters: int  # that compute one token: fewer than all where tokens choose experts
    linear_parameters: int  # in the linear layers of the blocks, without experts
    expert_parameters: int  # in the experts that tokens choose
    kv_parameters: int  # the part of `linear_parameters` that makes keys and values, by head
    replicated_parameters: int  # held by every GPU whole, however many share the model
    layers: int
    hidden_size: int
    vocab_size: int
    attention_heads: int
    inner_sizes: tuple[int, ...]  # widths of feed-forward layers and experts, which GPUs divide
    # Elements that the widest feed-forward layer makes of one token, experts counted by choice.
    mlp_elements: int
    cache: tuple[CacheLayers, ...]
    max_context: int | None  # most tokens of a sequence; None if not configured
    dtype: str  # of the weights; what vLLM takes with --dtype auto
    quantization: Quantization | None = None
    kv_bytes: int | None = None  # of an element in the cache, where the configuration fixes them
    stored_bytes: int | None = None  # of the weights on disk, where they are there to be seen
    stored_dtype: str | None = None  # of the stored weights, where it is one for nearly all
    read_bytes: int | None = None  # that loading reads, where it compresses them
    notes: tuple[str, ...] = ()  # remarks on these figures, one sentence each

    @property
    def kv_heads(self) -> int:
        """Key-value heads that GPUs divide among each other; 1 where they share one vector."""
        return max((layers.kv_heads for layers in self.cache), default=1)

    @property
    def is_latent(self) -> bool:
        return any(layers.is_latent for layers in self.cache)
