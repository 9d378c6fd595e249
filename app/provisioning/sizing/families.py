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
    dimension ("head") or over all heads ("all"). `attention_bias`: of queries, keys and values, and of
    the output if `output_bias`. `windows`: the layers that the member
    `sliding_window` applies to, if there is no `layer_types`. `positions`: rows that a table of
    learned positions has beyond the longest sequence; None: no table. `defaults`: members that the
    family's published files may leave out.
    """

    gated: bool = True
    norms: int = 2
    norm_vectors: int = 1
    final_norm: bool = True
    qk_norm: Literal["", "head", "all"] = ""
    qk_norm_flag: bool | str = True
    attention_bias: bool | str = "attention_bias"
    output_bias: bool = True
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


_LLAMA = Family(mlp_bias="mlp_bias")
_GPT2 = Family(
    gated=False, norm_vectors=2, tied=True, positions=0, inner_factor=4, windows="none",
    attention_bias=True, mlp_bias=True,
)  # fmt: skip
GENERIC = _LLAMA

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(attention_bias=False),
    "mixtral": Family(attention_bias=False),
    "qwen2": Family(attention_bias=True, output_bias=False, windows="upper"),
    "qwen2_moe": Family(
        attention_bias=True, output_bias=False, windows="upper", shared_gate=True
    ),
    "qwen3": Family(qk_norm="head", windows="upper", defaults={"head_dim": 128}),
    "qwen3_moe": Family(qk_norm="head", windows="upper"),
    "phi3": Family(attention_bias=False),
    "phi": Family(
        gated=False, norms=1, norm_vectors=2, head_bias=True, windows="none", attention_bias=True,
        mlp_bias=True,
    ),
    "gemma": Family(tied=True, windows="none", defaults={"head_dim": 256}),
    "gemma2": Family(tied=True, norms=4, windows="even", defaults={"head_dim": 256}),
    "gemma3_text": Family(
        tied=True, norms=4, windows="pattern", pattern=6, qk_norm="head", defaults={"head_dim": 256}
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": Family(
        gated=False, norms=1, norm_vectors=2, attention_bias=False, mlp_bias=True, head_bias=True,
        inner_factor=4, windows="none",
    ),
    # The flag is absent in older files, and true there.
    "gpt_neox": Family(
        gated=False, norm_vectors=2, mlp_bias=True, windows="none",
        defaults={"attention_bias": True},
    ),
    "gpt_oss": Family(
        attention_bias=True, windows="even", router_bias=True, expert_bias=True, sinks=True
    ),
    "opt": Family(
        gated=False, norm_vectors=2, tied=True, positions=2, windows="none",
        attention_bias="enable_bias", mlp_bias="enable_bias", defaults={"enable_bias": True},
    ),
    "bloom": Family(
        gated=False, norm_vectors=2, tied=True, embedding_norm=True, inner_factor=4,
        windows="none", attention_bias=True, mlp_bias=True,
    ),
    "falcon": Family(
        gated=False, norm_vectors=2, tied=True, inner_factor=4, windows="none",
        attention_bias="bias", mlp_bias="bias",
    ),
    "starcoder2": Family(
        gated=False, norm_vectors=2, tied=True, attention_bias="use_bias", mlp_bias="use_bias",
        defaults={"use_bias": True},
    ),
    "stablelm": Family(
        norm_vectors=2, attention_bias="use_qkv_bias", output_bias=False, windows="none"
    ),
    "cohere": Family(
        norms=1, tied=True, qk_norm="all", qk_norm_flag="use_qk_norm", windows="none"
    ),
    "cohere2": Family(norms=1, tied=True, windows="pattern", pattern=4),
    "olmo": Family(norms=0, final_norm=False, windows="none"),
    "olmo2": Family(qk_norm="all", windows="none"),
    "granite": Family(mlp_bias="mlp_bias", windows="none"),
    "smollm3": Family(tied=True, windows="none", mlp_bias="mlp_bias"),
    "internlm2": Family(attention_bias="bias", windows="none"),
    "baichuan": Family(attention_bias=False, windows="none"),
    "glm": Family(output_bias=False),
    "glm4": Family(norms=4, output_bias=False),
    "glm4_moe": Family(
        qk_norm="head", qk_norm_flag="use_qk_norm", output_bias=False, router_bias=True
    ),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(router_bias=True),  # the routers' biases balance the load
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

# Members that the `text_config` of multimodal models leaves out: the defaults of the classes
# (configuration_gemma3.py, configuration_llama.py).
NESTED_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "max_position_embeddings": 131_072, "sliding_window": 4096,
    },
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
}  # fmt: skip
