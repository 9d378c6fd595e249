"""Families of transformers: the differences of their layers from Llama's.

Each is named by `model_type` in config.json. The traits follow the models' definitions in Hugging
Face transformers (src/transformers/models/FAMILY/modeling_FAMILY.py); a test compares the counts
with those of the real model classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Windows = Literal["all", "even", "pattern", "upper", "none"]


@dataclass(frozen=True, slots=True)
class Family:
    """Traits of a family; the defaults are Llama's.

    A trait given as a text is the name of its flag in config.json. `norms` are the norms of a layer,
    `norm_vectors` the vectors of each (2 with a bias). `qk_norm`: norms of queries and keys, per head
    dimension ("head") or over all heads ("all"). `windows`: the layers that the member
    `sliding_window` applies to, if there is no `layer_types`. `positions`: rows that a table of
    learned positions has beyond the longest sequence; None: no table. `defaults`: members that the
    family's published files may leave out.
    """

    gated: bool = True
    norms: int = 2
    norm_vectors: int = 1
    final_norm: bool = True
    qk_norm: Literal["", "head", "all"] = ""
    qk_norm_flag: str = ""
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool = False
    tied: bool = False
    positions: int | None = None
    embedding_norm: bool = False
    inner_factor: int | None = None
    windows: Windows = "all"
    pattern: int = 0
    router_bias: bool = False
    expert_bias: bool = False
    sinks: bool = False
    shared_gate: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_LLAMA = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")
_GLM = Family(qkv_bias="attention_bias")
_GPT2 = Family(
    gated=False, norm_vectors=2, tied=True, positions=0, inner_factor=4, windows="none",
    qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip
# Files of Gemma 3 name only what differs from the class's defaults (configuration_gemma3.py).
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
# The same of Llama inside multimodal models (configuration_llama.py).
_LLAMA_DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

GENERIC = Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias")

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(),
    "mixtral": Family(),
    "qwen2": Family(qkv_bias=True, windows="upper"),
    "qwen2_moe": Family(qkv_bias=True, windows="upper", shared_gate=True),
    "qwen3": Family(
        qk_norm="head", windows="upper", qkv_bias="attention_bias", out_bias="attention_bias",
        defaults={"head_dim": 128},
    ),
    "qwen3_moe": Family(
        qk_norm="head", windows="upper", qkv_bias="attention_bias", out_bias="attention_bias",
    ),
    "phi3": Family(),
    "phi": Family(
        gated=False, norms=1, norm_vectors=2, head_bias=True, windows="none", qkv_bias=True,
        out_bias=True, mlp_bias=True,
    ),
    "gemma": Family(
        tied=True, windows="none", qkv_bias="attention_bias", out_bias="attention_bias",
        defaults={"head_dim": 256},
    ),
    "gemma2": Family(
        tied=True, norms=4, windows="even", qkv_bias="attention_bias", out_bias="attention_bias",
        defaults={"head_dim": 256},
    ),
    "gemma3_text": Family(
        tied=True, norms=4, windows="pattern", pattern=6, qk_norm="head",
        qkv_bias="attention_bias", out_bias="attention_bias", defaults={"head_dim": 256},
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": Family(
        gated=False, norms=1, norm_vectors=2, mlp_bias=True, head_bias=True, inner_factor=4,
        windows="none",
    ),
    "gpt_neox": Family(
        gated=False, norm_vectors=2, mlp_bias=True, windows="none",
        # Absent in older files, and true there.
        qkv_bias="attention_bias", out_bias="attention_bias", defaults={"attention_bias": True},
    ),
    "gpt_oss": Family(
        qkv_bias=True, out_bias=True, windows="even", router_bias=True, expert_bias=True, sinks=True
    ),
    "opt": Family(
        gated=False, norm_vectors=2, tied=True, positions=2, windows="none",
        qkv_bias="enable_bias", out_bias="enable_bias", mlp_bias="enable_bias",
        defaults={"enable_bias": True},
    ),
    "bloom": Family(
        gated=False, norm_vectors=2, tied=True, embedding_norm=True, inner_factor=4,
        windows="none", qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    "falcon": Family(
        gated=False, norm_vectors=2, tied=True, inner_factor=4, windows="none",
        qkv_bias="bias", out_bias="bias", mlp_bias="bias",
    ),
    "starcoder2": Family(
        gated=False, norm_vectors=2, tied=True, qkv_bias="use_bias", out_bias="use_bias",
        mlp_bias="use_bias", defaults={"use_bias": True},
    ),
    "stablelm": Family(norm_vectors=2, qkv_bias="use_qkv_bias", windows="none"),
    "cohere": Family(
        norms=1, tied=True, qk_norm="all", qk_norm_flag="use_qk_norm", windows="none",
        qkv_bias="attention_bias", out_bias="attention_bias",
    ),
    "cohere2": Family(
        norms=1, tied=True, windows="pattern", pattern=4, qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "olmo": Family(
        norms=0, final_norm=False, windows="none", qkv_bias="attention_bias",
        out_bias="attention_bias",
    ),
    "olmo2": Family(
        qk_norm="all", windows="none", qkv_bias="attention_bias", out_bias="attention_bias"
    ),
    "granite": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias", windows="none"
    ),
    "smollm3": Family(
        tied=True, windows="none", qkv_bias="attention_bias", out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "internlm2": Family(qkv_bias="bias", out_bias="bias", windows="none"),
    "baichuan": Family(windows="none"),
    "glm": _GLM,
    "glm4": Family(norms=4, qkv_bias="attention_bias"),
    "glm4_moe": Family(
        qk_norm="head", qk_norm_flag="use_qk_norm", qkv_bias="attention_bias", router_bias=True
    ),
    "deepseek_v2": Family(qkv_bias="attention_bias", out_bias="attention_bias"),
    # The routers' biases balance the load.
    "deepseek_v3": Family(
        qkv_bias="attention_bias", out_bias="attention_bias", router_bias=True
    ),
}  # fmt: skip

# Encoders, encoder-decoders (most of their files set `is_encoder_decoder`), and models that keep a
# state in place of keys and values.
NOT_COUNTED = frozenset(
    {
        "albert", "bert", "big_bird", "camembert", "clip", "deberta", "deberta-v2", "distilbert",
        "electra", "ernie", "esm", "hubert", "longformer", "modernbert", "mpnet", "new",
        "nomic_bert", "roberta", "siglip", "siglip2", "vit", "wav2vec2", "xlm-roberta",
        "bart", "mbart", "mt5", "t5", "umt5", "whisper",
        "falcon_mamba", "mamba", "mamba2", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm",
    }
)  # fmt: skip

# Members that the files of a model's `text_config` may leave out.
NESTED_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": _GEMMA3_DEFAULTS,
    "llama": _LLAMA_DEFAULTS,
}
