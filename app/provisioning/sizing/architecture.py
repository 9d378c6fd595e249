"""Counts of a model's elements from the members of its config.json.

With h the hidden size, H heads of d elements, K key-value heads, I the inner width and V the
vocabulary, a layer of Llama has 2hHd + 2hKd + 3hI + 2h parameters, and the model VH + layers + h (+
Vh where the output head is a matrix of its own). The differences of other families are in
`families.py`; multi-head latent attention and experts are here. docs/plan.md has the sources.
"""

from dataclasses import astuple, dataclass

from app.provisioning.sizing.facts import CacheLayers, ModelFacts, PlanError
from app.provisioning.sizing.families import FAMILIES, GENERIC, NESTED_DEFAULTS, NOT_COUNTED, Family
from app.provisioning.sizing.members import Members
from app.provisioning.sizing.quantization import read_quantization
from app.provisioning.sizing.windows import cache_layers

# Bounds: ten times the published maxima, so that no product is long and no loop is large.
MAX_LAYERS = 4096
MAX_WIDTH = 1 << 24
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 16
MAX_CONTEXT = 1 << 31

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_VOCABULARY = ("vocab_size", "padded_vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k")
_DTYPES = {
    "float32": "float32", "float": "float32", "bfloat16": "bfloat16", "float16": "float16",
    "half": "float16",
}  # fmt: skip


def read_facts(document: object) -> ModelFacts:
    """Return the facts of a parsed config.json. Raises PlanError."""
    outer = Members(document)
    _refuse_uncounted(outer)
    config, notes = _language_model(outer)
    is_whole = config is outer
    model_type = config.text("model_type", default="unknown")
    family = FAMILIES.get(model_type)
    if family is None:
        notes.append(
            f"The architecture {model_type!r} is not known here: counted as a generic transformer; "
            "take the figures as a first guess."
        )
    else:
        config = config.with_defaults(family.defaults)
    dtype = config.text("torch_dtype", "dtype") or outer.text("torch_dtype", "dtype")
    if dtype.removeprefix("torch.") not in _DTYPES:
        named = f"the dtype {dtype!r}, unknown here" if dtype else "no dtype"
        notes.append(f"config.json names {named}: 16 bits are taken.")
    source = outer if outer.has("quantization_config") else config
    is_compressed = source.has("quantization_config")
    quantization, kv_bytes, quantization_notes = read_quantization(source)
    model = _Model(config, family or GENERIC)
    total = model.parameters()
    cache, cache_notes = model.cache()
    return ModelFacts(
        model_type=model_type,
        is_known=family is not None,
        is_exact=family is not None and is_whole and is_compressed == (quantization is not None),
        dtype=_DTYPES.get(dtype.removeprefix("torch."), "bfloat16"),
        quantization=quantization,
        kv_bytes=kv_bytes,
        parameters=total.linear + total.small + total.experts,
        active_parameters=total.linear + total.small + total.chosen,
        linear_parameters=total.linear,
        expert_parameters=total.experts,
        kv_parameters=total.kv,
        replicated_parameters=total.replicated,
        layers=model.layers,
        hidden_size=model.hidden,
        vocab_size=model.vocabulary,
        attention_heads=model.heads,
        inner_sizes=tuple(sorted({model.inner, model.expert_inner, model.shared_inner} - {0})),
        mlp_elements=model.mlp_elements(),
        cache=cache,
        max_context=model.context,
        notes=(*notes, *quantization_notes, *cache_notes),
    )


def _refuse_uncounted(outer: Members) -> None:
    """Models that are not decoders have other members, or the same with another meaning."""
    model_type = outer.text("model_type")
    if model_type in NOT_COUNTED or outer.get("is_encoder_decoder") is True:
        raise PlanError(
            f"model_type: {model_type!r}: encoder, encoder-decoder and state-space models are not "
            "counted (docs/plan.md, Limits)"
        )


def _language_model(outer: Members) -> tuple[Members, list[str]]:
    for name in ("text_config", "llm_config"):
        if not outer.has(name):
            continue
        inner = outer.inner(name)
        defaults = NESTED_DEFAULTS.get(inner.text("model_type"), {})
        note = "Only the language model is counted, without its vision and audio parts."
        return inner.with_defaults(defaults), [note]
    return outer, []


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Parameters of a part of the model: linear layers, experts, and the small rest.

    `kv`: the part of `linear` that makes keys and values. `replicated`: the part of `linear` and
    `small` that every GPU holds. `chosen`: the part of `experts` that one token passes.
    """

    linear: int = 0
    small: int = 0
    kv: int = 0
    replicated: int = 0
    experts: int = 0
    chosen: int = 0

    def __add__(self, other: "_Parameters") -> "_Parameters":
        return _Parameters(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, layers: int) -> "_Parameters":
        return _Parameters(*(layers * count for count in astuple(self)))


class _Model:
    """The sizes that config.json names; a part that the model does not have is 0 wide."""

    def __init__(self, config: Members, family: Family) -> None:
        self.config = config
        self.family = family
        self.model_type = config.text("model_type")
        self.layers = config.number(*_LAYERS, high=MAX_LAYERS)
        self.hidden = config.number(*_HIDDEN, high=MAX_WIDTH)
        self.heads = config.number(*_HEADS, high=MAX_HEADS)
        self.vocabulary = config.number(*_VOCABULARY, high=MAX_WIDTH)
        self.kv_heads = self._kv_heads()
        self.is_latent = config.has("kv_lora_rank")
        if not self.is_latent and self.heads % self.kv_heads:
            raise PlanError(
                f"{config.name_of(*_KV_HEADS)}: {self.kv_heads} does not divide the "
                f"{self.heads} attention heads"
            )
        if not (config.get("head_dim") or self.is_latent) and self.hidden % self.heads:
            raise PlanError(
                f"head_dim: missing, and {self.heads} attention heads do not divide the hidden "
                f"size {self.hidden}"
            )
        self.head = config.number("head_dim", high=MAX_WIDTH, default=self.hidden // self.heads)
        self.experts = config.number(*_EXPERTS, low=0, high=MAX_EXPERTS, default=0)
        self.context = config.number(*_CONTEXT, high=MAX_CONTEXT, default=0) or None
        self.moe_layers = self._moe_layers() if self.experts else 0
        self.inner = self.expert_inner = self.shared_inner = self.chosen = 0
        if self.moe_layers < self.layers:
            default = self.hidden * family.inner_factor if family.inner_factor else None
            self.inner = config.number(*_INNER, high=MAX_WIDTH, default=default)
        if self.moe_layers:
            self.expert_inner = config.number("moe_intermediate_size", *_INNER, high=MAX_WIDTH)
            self.shared_inner = self._shared_inner()
            self.chosen = min(self.experts, config.number(*_CHOSEN, high=MAX_EXPERTS))

    def parameters(self) -> _Parameters:
        norms = self._norms() * self.family.norm_vectors * self.hidden
        layer = self._latent_attention() if self.is_latent else self._attention()
        layer += _Parameters(small=norms, replicated=norms)
        dense_layers = self.layers - self.moe_layers
        feed_forward = self._feed_forward(self.inner) * dense_layers
        feed_forward += self._expert_layer() * self.moe_layers
        return layer * self.layers + feed_forward + self._outside_layers()

    def mlp_elements(self) -> int:
        expert = self.chosen * (3 * self.expert_inner + self.hidden)
        return max(self._matrices * self.inner, expert + 3 * self.shared_inner)

    def cache(self) -> tuple[tuple[CacheLayers, ...], list[str]]:
        cache, notes = cache_layers(
            self.config, self.family, self.layers, self.kv_heads, 2 * self.head
        )
        if self.is_latent:
            latent, rope, *_ = self._latent_sizes()
            cache = (CacheLayers(self.layers, 1, latent + rope, is_latent=True),)
        ahead = self.config.number("num_nextn_predict_layers", low=0, high=MAX_LAYERS, default=0)
        if ahead:
            notes.append(
                f"Layers that predict further tokens ({ahead}) are not counted: they are loaded for "
                "speculative decoding only."
            )
        return cache, notes

    # --- Attention -----------------------------------------------------------------------------

    def _kv_heads(self) -> int:
        flag = self.config.flag
        is_old_falcon = self.model_type == "falcon" and not flag(
            "new_decoder_architecture", default=False
        )
        if is_old_falcon or self.model_type == "gpt_bigcode":
            return 1 if flag("multi_query", default=True) else self.heads
        return self.config.number(*_KV_HEADS, high=MAX_HEADS, default=self.heads)

    def _attention(self) -> _Parameters:
        h, width, kv_width = self.hidden, self.heads * self.head, self.kv_heads * self.head
        family = self.family
        small = family.sinks * self.heads
        if self._has(family.attention_bias):
            small += width + 2 * kv_width + family.output_bias * h
        if family.qk_norm and self._has(family.qk_norm_flag):
            small += 2 * self.head if family.qk_norm == "head" else width + kv_width
        return _Parameters(2 * h * (width + kv_width), small, kv=2 * h * kv_width)

    def _latent_attention(self) -> _Parameters:
        """DeepSeek's multi-head latent attention (https://arxiv.org/abs/2405.04434, appendix C)."""
        h, heads = self.hidden, self.heads
        latent, rope, nope, value = self._latent_sizes()
        rank = self.config.number("q_lora_rank", high=MAX_WIDTH, default=0)
        down = h * (latent + rope) + h * rank
        up = (rank or h) * heads * (nope + rope) + latent * heads * (nope + value)
        small = latent + rank
        if self._has(self.family.attention_bias):
            small += rank + latent + rope + h
        return _Parameters(down + up + heads * value * h, small, replicated=down + latent + rank)

    def _latent_sizes(self) -> list[int]:
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        return [self.config.number(name, high=MAX_WIDTH) for name in names]

    # --- Feed-forward layers and experts ---------------------------------------------------------

    @property
    def _matrices(self) -> int:
        return 3 if self.family.gated else 2

    def _feed_forward(self, inner: int) -> _Parameters:
        bias = self._has(self.family.mlp_bias) * ((self._matrices - 1) * inner + self.hidden)
        return _Parameters(self._matrices * self.hidden * inner, bias)

    def _expert_layer(self) -> _Parameters:
        """The experts, the shared ones, which every token passes, and the router."""
        family = self.family
        one = 3 * self.hidden * self.expert_inner
        one += family.expert_bias * (2 * self.expert_inner + self.hidden)
        router = (self.hidden + family.router_bias) * self.experts
        router += family.shared_gate * self.hidden
        return self._feed_forward(self.shared_inner) + _Parameters(
            small=router, replicated=router, experts=self.experts * one, chosen=self.chosen * one
        )

    def _shared_inner(self) -> int:
        if self.config.has("shared_expert_intermediate_size"):
            return self.config.number("shared_expert_intermediate_size", low=0, high=MAX_WIDTH)
        shared = self.config.number("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
        return shared * self.expert_inner

    def _moe_layers(self) -> int:
        config = self.config
        first = config.number("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
        every = config.number("decoder_sparse_step", high=MAX_LAYERS, default=1)
        frequency = config.number("moe_layer_freq", high=MAX_LAYERS, default=1)
        dense = set(config.numbers("mlp_only_layers", MAX_LAYERS))
        return sum(
            layer not in dense and (layer + 1) % every == 0 and layer % frequency == 0
            for layer in range(first, self.layers)
        )

    # --- Norms, embeddings, the rest --------------------------------------------------------------

    def _norms(self) -> int:
        flag = self.config.flag
        if self.model_type == "stablelm" and flag("use_parallel_residual", default=False):
            return 1
        if self.model_type == "falcon":
            is_new = flag("new_decoder_architecture", default=False)
            if is_new or flag("parallel_attn", default=True):
                default = 2 if is_new else 1
                return self.config.number("num_ln_in_parallel_attn", high=2, default=default)
        return self.family.norms

    def _outside_layers(self) -> _Parameters:
        family, h = self.family, self.hidden
        width = self.config.number("word_embed_proj_dim", high=MAX_WIDTH, default=h)
        tied = self.config.flag("tie_word_embeddings", default=family.tied)
        embeddings = self.vocabulary * (width * (1 if tied else 2) + family.head_bias)
        # OPT with 350M parameters normalizes behind each layer, and not at the end.
        final_norm = family.final_norm and self.config.flag("do_layer_norm_before", default=True)
        replicated = family.norm_vectors * h * (final_norm + family.embedding_norm)
        if family.positions is not None:
            if self.context is None:
                raise PlanError(f"{self.config.name_of(*_CONTEXT)}: missing")
            replicated += (self.context + family.positions) * h
        if width != h:
            replicated += 2 * width * h
        return _Parameters(small=embeddings + replicated, replicated=replicated)

    def _has(self, trait: bool | str) -> bool:
        return self.config.flag(trait, default=False) if isinstance(trait, str) else trait
