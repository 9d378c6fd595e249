"""The resource calculator against the real model classes and vLLM's own division of memory."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.cache import BLOCK_TOKENS, CacheShape
from app.provisioning.sizing.families import FAMILIES
from tests.conftest import TRITON_VENV
from tests.plan_configs import KNOWN

MEMORY = 10 << 30
IN_FLIGHT = 4096
CONTEXTS = [256, 6000, 32_768]
STAGES = [1, 2, 3]  # of a pipeline; the smallest models here have three layers
# Its windows are in its upper layers alone; stages are calculated with the kinds spread over all of them.
NOT_SPREAD = {"qwen2 with windows"}

SMALL = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 7,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Families and members that none of the known models has.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama with biases": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
    },
    "llama with wide heads": {"model_type": "llama", "head_dim": 40},
    "qwen2 with windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64,
        "max_window_layers": 3,
    },
    "qwen2_moe, partly dense": {
        "model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    },
    "gemma": {"model_type": "gemma", "head_dim": 32},
    "gemma2": {"model_type": "gemma2", "head_dim": 32, "sliding_window": 64},
    "gpt_bigcode": {
        "model_type": "gpt_bigcode", "vocab_size": 1000, "n_embd": 96, "n_layer": 3, "n_head": 6,
        "n_positions": 512,
    },
    "gptj": {
        "model_type": "gptj", "vocab_size": 1000, "n_embd": 96, "n_layer": 3, "n_head": 6,
        "n_positions": 512, "rotary_dim": 8, "tie_word_embeddings": False,
    },
    "falcon 40b": {
        "model_type": "falcon", "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True,
        "bias": False, "tie_word_embeddings": False,
    },
    "falcon 1b": {
        "model_type": "falcon", "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 6, "multi_query": False, "parallel_attn": False, "bias": True,
        "alibi": True,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 64},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "stablelm in parallel": {"model_type": "stablelm", "use_parallel_residual": True},
    "cohere": {"model_type": "cohere", "use_qk_norm": True},
    "cohere2": {"model_type": "cohere2", "sliding_window": 64},
    "olmo": {"model_type": "olmo"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "attention_bias": True},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
    "glm": {"model_type": "glm", "head_dim": 16, "attention_bias": True, "pad_token_id": 0},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": True, "pad_token_id": 0},
    "glm4_moe": {
        "model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
        "first_k_dense_replace": 2, "n_shared_experts": 1, **EXPERTS,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "num_key_value_heads": 6, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "attention_bias": True, **LATENT,
        **EXPERTS,
    },
}  # fmt: skip
# Their classes are not in transformers: the models bring their own code.
NOT_IN_TRANSFORMERS = {"baichuan", "internlm2"}


@pytest.fixture(scope="module")
def configs() -> dict[str, dict[str, Any]]:
    """All configurations, without what is about the checkpoint alone."""
    named = {name: known.config for name, known in KNOWN.items()}
    named |= {
        name: variant if "vocab_size" in variant else SMALL | variant
        for name, variant in VARIANTS.items()
    }
    return {
        name: {key: value for key, value in config.items() if key != "quantization_config"}
        for name, config in named.items()
    }


@pytest.fixture(scope="module")
def answers(
    configs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The libraries' sizes of each."""
    request = {
        "models": configs,
        "memory": MEMORY,
        "block_tokens": BLOCK_TOKENS,
        "in_flight": IN_FLIGHT,
        "contexts": CONTEXTS,
        "stages": STAGES,
    }
    run = subprocess.run(
        [TRITON_VENV / "bin" / "python", "-I", Path(__file__).with_name("sizes_by_vllm.py")],
        input=json.dumps(request), capture_output=True, text=True, check=False,
        cwd=tmp_path_factory.mktemp("sizes"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def test_parameters_are_those_of_the_real_classes(
    configs: dict[str, dict[str, Any]], answers: dict[str, dict[str, Any]]
) -> None:
    ours = {name: read_facts(config).parameters for name, config in configs.items()}
    assert ours == {name: answer["parameters"] for name, answer in answers.items()}


def test_the_cache_is_divided_as_vllm_divides_it(
    configs: dict[str, dict[str, Any]], answers: dict[str, dict[str, Any]]
) -> None:
    different = []
    for name, config in configs.items():
        facts = read_facts(config)
        for stages, theirs in zip(STAGES, answers[name]["cache"], strict=True):
            shape = CacheShape(facts, 1, 2, IN_FLIGHT, stages=stages)
            ours = [[shape.tokens(MEMORY, size), shape.requests(MEMORY, size)] for size in CONTEXTS]
            if ours != theirs and not (stages > 1 and name in NOT_SPREAD):
                different.append((name, stages, ours, theirs))
    assert different == []


def test_every_family_is_compared(configs: dict[str, dict[str, Any]]) -> None:
    compared = {config["model_type"] for config in configs.values()}
    assert compared == set(FAMILIES) - NOT_IN_TRANSFORMERS
