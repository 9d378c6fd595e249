"""Counts of a model's elements from the members of its config.json.

With h the hidden size, H heads of d elements, K key-value heads, I the inner width and V the
vocabulary, a layer of Llama has 2hHd + 2hKd + 3hI + 2h parameters, and the model VH + layers + h (+
Vh where the output head is a matrix of its own). The differences of other families are in
`families.py`; multi-head latent attention and experts are here. docs/plan.md has the sources.
"""

from dataclasses import dataclass

from app.provisioning.sizing.facts import CacheLayers, ModelFacts, PlanError, Quantization
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
    quantization, kv_bytes, more = read_quantization(source)
    return _Counter(config, family or GENERIC).facts(
        model_type=model_type,
        is_known=family is not None,
        is_exact=family is not None and is_whole and is_compressed == (quantization is not None),
        dtype=_DTYPES.get(dtype.removeprefix("torch."), "bfloat16"),
        quantization=quantization,
        kv_bytes=kv_bytes,
        notes=[*notes, *more],
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
    """Multimodal models keep their language model's members in `text_config`."""
    for name in ("text_config", "llm_config"):
        if not outer.has(name):
            continue
        inner = outer.inner(name)
        defaults = NESTED_DEFAULTS.get(inner.text("model_type"), {})
        note = "Only the language model is counted, without its vision and audio parts."
        return inner.with_defaults(defaults), [note]
    return outer, []


@dataclass(frozen=True, slots=True)
class _Attention:
    """Parameters of one layer's attention."""

    linear: int
    kv: int
    small: int  # biases and norms
    replicated: int


class _Counter:
    def __init__(self, config: Members, family: Family) -> None:
        self.config = config
        self.family = family
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

    def facts(
        self,
        *,
        model_type: str,
        is_known: bool,
        is_exact: bool,
        dtype: str,
        quantization: Quantization | None,
        kv_bytes: int | None,
        notes: list[str],
    ) -> ModelFacts:
        attention = self._latent() if self.is_latent else self._attention()
        moe_layers = self._moe_layers()
        dense = self._feed_forward(self._inner()) if moe_layers < self.layers else (0, 0)
        routed, chosen, shared, router = self._expert_layer() if moe_layers else (0, 0, (0, 0), 0)
        norms = self._norms()
        linear = self.layers * attention.linear
        linear += (self.layers - moe_layers) * dense[0] + moe_layers * shared[0]
        replicated = self.layers * (norms + attention.replicated) + moe_layers * router
        small = self.layers * (attention.small + norms) + moe_layers * (router + shared[1])
        small += (self.layers - moe_layers) * dense[1]
        outside, outside_replicated = self._outside_layers()
        parameters = linear + small + moe_layers * routed + outside
        cache, more = cache_layers(
            self.config, self.family, self.layers, self.kv_heads, 2 * self.head
        )
        if self.is_latent:
            cache = (self._latent_cache(),)
        return ModelFacts(
            model_type=model_type,
            is_known=is_known,
            is_exact=is_exact,
            dtype=dtype,
            quantization=quantization,
            kv_bytes=kv_bytes,
            parameters=parameters,
            active_parameters=parameters - moe_layers * (routed - chosen),
            linear_parameters=linear,
            expert_parameters=moe_layers * routed,
            kv_parameters=self.layers * attention.kv,
            replicated_parameters=replicated + outside_replicated,
            layers=self.layers,
            hidden_size=self.hidden,
            vocab_size=self.vocabulary,
            attention_heads=self.heads,
            inner_sizes=self._inner_sizes(moe_layers),
            mlp_elements=self._mlp_elements(moe_layers),
            cache=cache,
            max_context=self.context,
            notes=(*notes, *more, *self._remarks()),
        )

    # --- Attention -----------------------------------------------------------------------------

    def _kv_heads(self) -> int:
        config = self.config
        if config.text("model_type") == "falcon" and not config.flag(
            "new_decoder_architecture", default=False
        ):
            return 1 if config.flag("multi_query", default=True) else self.heads
        if config.text("model_type") == "gpt_bigcode":
            return 1 if config.flag("multi_query", default=True) else self.heads
        return config.number(*_KV_HEADS, high=MAX_HEADS, default=self.heads)

    def _attention(self) -> _Attention:
        h, width, kv_width = self.hidden, self.heads * self.head, self.kv_heads * self.head
        small = self._is("qkv_bias") * (width + 2 * kv_width) + self._is("out_bias") * h
        small += self.family.sinks * self.heads
        if self.family.qk_norm and self._has_qk_norm():
            small += 2 * self.head if self.family.qk_norm == "head" else width + kv_width
        return _Attention(2 * h * width + 2 * h * kv_width, 2 * h * kv_width, small, 0)

    def _latent(self) -> _Attention:
        """DeepSeek's multi-head latent attention (https://arxiv.org/abs/2405.04434, appendix C)."""
        h, heads = self.hidden, self.heads
        latent, rope, nope, value = self._latent_sizes()
        rank = self.config.number("q_lora_rank", high=MAX_WIDTH, default=0)
        down = h * (latent + rope) + h * rank
        up = (rank or h) * heads * (nope + rope) + latent * heads * (nope + value)
        small = latent + rank
        if self._is("qkv_bias"):
            small += rank + latent + rope + h
        return _Attention(down + up + heads * value * h, 0, small, down + latent + rank)

    def _latent_sizes(self) -> tuple[int, int, int, int]:
        read = self.config.number
        return (
            read("kv_lora_rank", high=MAX_WIDTH),
            read("qk_rope_head_dim", high=MAX_WIDTH),
            read("qk_nope_head_dim", high=MAX_WIDTH),
            read("v_head_dim", high=MAX_WIDTH),
        )

    def _latent_cache(self) -> CacheLayers:
        latent, rope, _, _ = self._latent_sizes()
        return CacheLayers(self.layers, 1, latent + rope, is_latent=True)

    def _has_qk_norm(self) -> bool:
        flag = self.family.qk_norm_flag
        return self.config.flag(flag, default=False) if flag else True

    # --- Feed-forward layers and experts ---------------------------------------------------------

    def _inner(self) -> int:
        factor = self.family.inner_factor
        default = factor * self.hidden if factor else None
        return self.config.number(*_INNER, high=MAX_WIDTH, default=default)

    def _expert_inner(self) -> int:
        return self.config.number("moe_intermediate_size", *_INNER, high=MAX_WIDTH)

    def _feed_forward(self, inner: int) -> tuple[int, int]:
        matrices = 3 if self.family.gated else 2
        bias = self._is("mlp_bias") * ((matrices - 1) * inner + self.hidden)
        return matrices * self.hidden * inner, bias

    def _shared_inner(self) -> int:
        """Width of the shared experts, which every token passes."""
        if self.config.has("shared_expert_intermediate_size"):
            return self.config.number("shared_expert_intermediate_size", low=0, high=MAX_WIDTH)
        shared = self.config.number("n_shared_experts", low=0, high=MAX_EXPERTS, default=0)
        return shared * self._expert_inner()

    def _expert_layer(self) -> tuple[int, int, tuple[int, int], int]:
        """Parameters of all experts, of those that a token chooses, of the shared ones, and of the router."""
        inner = self._expert_inner()
        one = 3 * self.hidden * inner
        one += self.family.expert_bias * (2 * inner + self.hidden)
        shared, bias = self._feed_forward(self._shared_inner())
        router = self.hidden * self.experts + self.family.router_bias * self.experts
        router += self.family.shared_gate * self.hidden
        return self.experts * one, self._chosen() * one, (shared, bias), router

    def _chosen(self) -> int:
        return min(self.experts, self.config.number(*_CHOSEN, high=MAX_EXPERTS))

    def _moe_layers(self) -> int:
        if not self.experts:
            return 0
        config = self.config
        first = config.number("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0)
        every = config.number("decoder_sparse_step", high=MAX_LAYERS, default=1)
        frequency = config.number("moe_layer_freq", high=MAX_LAYERS, default=1)
        dense = set(config.numbers("mlp_only_layers", MAX_LAYERS))
        return sum(
            layer >= first
            and layer not in dense
            and (layer + 1) % every == 0
            and layer % frequency == 0
            for layer in range(self.layers)
        )

    def _inner_sizes(self, moe_layers: int) -> tuple[int, ...]:
        sizes = {self._inner()} if moe_layers < self.layers else set()
        if moe_layers:
            sizes |= {self._expert_inner(), self._shared_inner()} - {0}
        return tuple(sorted(sizes))

    def _mlp_elements(self, moe_layers: int) -> int:
        matrices = 3 if self.family.gated else 2
        dense = matrices * self._inner() if moe_layers < self.layers else 0
        if not moe_layers:
            return dense
        expert = self._chosen() * (3 * self._expert_inner() + self.hidden)
        return max(dense, expert + 3 * self._shared_inner())

    # --- Norms, embeddings, the rest --------------------------------------------------------------

    def _norms(self) -> int:
        norms = self.family.norms
        config = self.config
        if config.text("model_type") == "falcon":
            is_new = config.flag("new_decoder_architecture", default=False)
            shared = config.number("num_ln_in_parallel_attn", high=2, default=2 if is_new else 1)
            is_parallel = is_new or config.flag("parallel_attn", default=True)
            norms = shared if is_parallel else 2
        if config.text("model_type") == "stablelm" and config.flag(
            "use_parallel_residual", default=False
        ):
            norms = 1
        return norms * self.family.norm_vectors * self.hidden

    def _outside_layers(self) -> tuple[int, int]:
        """Parameters outside the layers, and the part of them that every GPU holds."""
        family, h = self.family, self.hidden
        width = self.config.number("word_embed_proj_dim", high=MAX_WIDTH, default=h)
        tied = self.config.flag("tie_word_embeddings", default=family.tied)
        embeddings = self.vocabulary * width * (1 if tied else 2)
        embeddings += self.vocabulary * family.head_bias
        norm = family.norm_vectors * h
        replicated = norm * (self._has_final_norm() + family.embedding_norm)
        if family.positions is not None:
            replicated += (self._positions() + family.positions) * h
        if width != h:
            replicated += 2 * width * h
        return embeddings + replicated, replicated

    def _positions(self) -> int:
        if self.context is None:
            raise PlanError(f"{self.config.name_of(*_CONTEXT)}: missing")
        return self.context

    def _has_final_norm(self) -> bool:
        # OPT with 350M parameters normalizes behind each layer, and not at the end.
        return self.family.final_norm and self.config.flag("do_layer_norm_before", default=True)

    def _is(self, trait: str) -> bool:
        value: bool | str = getattr(self.family, trait)
        return self.config.flag(value, default=False) if isinstance(value, str) else value

    def _remarks(self) -> list[str]:
        remarks = []
        ahead = self.config.number("num_nextn_predict_layers", low=0, high=MAX_LAYERS, default=0)
        if ahead:
            remarks.append(
                f"Layers that predict further tokens ({ahead}) are not counted: they are loaded for "
                "speculative decoding only."
            )
        return remarks
