"""Known models: members of their config.json, and how many parameters they are published to have.

Each config is the published file's (https://huggingface.co/NAME/blob/main/config.json) without what
does not bear on sizes. `parameters` is the number of elements that the model's page on Hugging Face
counts in its safetensors files, unless a comment states otherwise.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """A published model. `token_bytes`: of its cache for one token in 16 bits, windows aside."""

    config: dict[str, Any]
    parameters: int
    token_bytes: int
    active_parameters: int | None = None


KNOWN = {
    "openai-community/gpt2": Known(
        {
            "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_positions": 1024, "n_ctx": 1024, "n_inner": None,
        },
        124_439_808,
        36_864,
    ),
    "facebook/opt-125m": Known(
        {
            "model_type": "opt", "vocab_size": 50272, "hidden_size": 768, "ffn_dim": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768, "do_layer_norm_before": True, "torch_dtype": "float16",
        },
        125_239_296,
        36_864,
    ),
    # Embeddings narrower than the layers, and norms behind them: 331.2 million as Meta counts.
    "facebook/opt-350m": Known(
        {
            "model_type": "opt", "vocab_size": 50272, "hidden_size": 1024, "ffn_dim": 4096,
            "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512, "do_layer_norm_before": False, "torch_dtype": "float16",
        },
        331_196_416,
        98_304,
    ),
    "bigscience/bloom-560m": Known(
        {
            "model_type": "bloom", "vocab_size": 250880, "n_embed": 1024, "n_layer": 24,
            "num_attention_heads": 16, "seq_length": 2048, "torch_dtype": "float16",
        },
        559_214_592,
        98_304,
    ),
    "EleutherAI/gpt-neox-20b": Known(
        {
            "model_type": "gpt_neox", "vocab_size": 50432, "hidden_size": 6144,
            "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
            "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "float16",
        },
        20_554_567_680,
        1_081_344,
    ),
    # The checkpoint holds the tied output head twice: its page states 7.22 billion.
    "tiiuae/falcon-7b": Known(
        {
            "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544,
            "num_hidden_layers": 32, "num_attention_heads": 71, "multi_query": True,
            "parallel_attn": True, "new_decoder_architecture": False, "bias": False, "alibi": False,
            "torch_dtype": "bfloat16",
        },
        6_921_720_704,
        8_192,
    ),
    "meta-llama/Llama-2-7b-hf": Known(
        {
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "max_position_embeddings": 4096,
            "tie_word_embeddings": False, "torch_dtype": "float16",
        },
        6_738_415_616,
        524_288,
    ),
    "meta-llama/Meta-Llama-3-8B": Known(
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 8192,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        8_030_261_248,
        131_072,
    ),
    "meta-llama/Llama-3.1-70B": Known(
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
            "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        70_553_706_496,
        327_680,
    ),
    "mistralai/Mistral-7B-v0.1": Known(
        {
            "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        7_241_732_096,
        131_072,
    ),
    "mistralai/Mixtral-8x7B-v0.1": Known(
        {
            "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096,
            "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        46_702_792_704,
        131_072,
    ),
    "Qwen/Qwen2.5-0.5B": Known(
        {
            "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
            "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
            "num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 32768,
            "use_sliding_window": False, "max_window_layers": 24, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        },
        494_032_768,
        12_288,
    ),
    "Qwen/Qwen2.5-7B": Known(
        {
            "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
            "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "max_position_embeddings": 131072, "sliding_window": 131072,
            "use_sliding_window": False, "max_window_layers": 28, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        7_615_616_512,
        57_344,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": Known(
        {
            "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
            "num_key_value_heads": 16, "max_position_embeddings": 8192, "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "num_experts": 60, "num_experts_per_tok": 4, "sliding_window": 32768,
            "use_sliding_window": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        14_315_784_192,
        196_608,
    ),
    "Qwen/Qwen3-0.6B": Known(
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
            "attention_bias": False, "torch_dtype": "bfloat16",
        },
        596_049_920,
        114_688,
    ),
    "Qwen/Qwen3-8B": Known(
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
            "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
            "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
            "attention_bias": False, "torch_dtype": "bfloat16",
        },
        8_190_735_360,
        147_456,
    ),
    "Qwen/Qwen3-30B-A3B": Known(
        {
            "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
            "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "sliding_window": None,
            "use_sliding_window": False, "tie_word_embeddings": False, "attention_bias": False,
            "torch_dtype": "bfloat16",
        },
        30_532_122_624,
        98_304,
        active_parameters=3_353_032_704,
    ),
    "microsoft/Phi-3-mini-4k-instruct": Known(
        {
            "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072,
            "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "sliding_window": 2047,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        3_821_079_552,
        393_216,
    ),
    "microsoft/phi-2": Known(
        {
            "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560,
            "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "max_position_embeddings": 2048,
            "tie_word_embeddings": False, "torch_dtype": "float16",
        },
        2_779_683_840,
        327_680,
    ),
    "google/gemma-2-9b": Known(
        {
            "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584,
            "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 8192,
            "sliding_window": 4096, "torch_dtype": "float32",
        },
        9_241_705_984,
        344_064,
    ),
    "google/gemma-3-1b-pt": Known(
        {
            "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
            "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        },
        999_885_952,
        26_624,
    ),
    # Its page counts 21.5 billion: packed experts with their scales. OpenAI's: 20.9 billion,
    # https://cdn.openai.com/pdf/419b6906-9da6-406c-a19d-1bb078ac7637/oai_gpt-oss_model_card.pdf
    "openai/gpt-oss-20b": Known(
        {
            "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
            "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
            "attention_bias": True, "num_local_experts": 32, "num_experts_per_tok": 4,
            "experts_per_token": 4, "sliding_window": 128, "tie_word_embeddings": False,
        },
        20_914_757_184,
        49_152,
    ),
    "deepseek-ai/DeepSeek-V2-Lite": Known(
        {
            "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
            "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
            "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "max_position_embeddings": 163840, "attention_bias": False,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
        15_706_484_224,
        31_104,
    ),
    # The main model of https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md
    # (671B), without the layer that predicts a further token.
    "deepseek-ai/DeepSeek-V3": Known(
        {
            "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
            "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
            "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
            "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1,
            "max_position_embeddings": 163840, "attention_bias": False,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "quantization_config": {
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
        },
        671_026_419_200,
        70_272,
    ),
}  # fmt: skip
