"""Sizes of models by the real libraries: `python sizes_by_vllm.py`, JSON in, JSON out.

Runs in Triton's environment, which has transformers and vLLM. For each model it makes the real class,
on torch's `meta` device (shapes without memory), and counts; and it has vLLM divide a memory into
blocks for the layers that the real configuration names. No weights, no engine.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.utils import get_pp_indices
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout


def main() -> None:
    request = json.load(sys.stdin)
    answers = {}
    for name, config in request["models"].items():
        made = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        layers = specs(made, request["block_tokens"])
        answers[name] = {
            "parameters": count(model),
            "cache": [
                [cache(layers, context, stages, request) for context in request["contexts"]]
                for stages in request["stages"]
            ],
        }
    json.dump(answers, sys.stdout)


def count(model: Any) -> int:
    """Parameters, each once, and what balances routers, which the checkpoint holds as well."""
    held = [*model.parameters()]
    held += [buffer for name, buffer in model.named_buffers() if "score_correction_bias" in name]
    return sum(int(tensor.numel()) for tensor in held)


def cache(
    layers: dict[str, KVCacheSpec], context: int, stages: int, request: dict[str, Any]
) -> tuple[int, float]:
    """Tokens and requests of this length that the memory holds, on each of so many nodes."""
    engine = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=context),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        max_in_flight_tokens=request["in_flight"],
    )
    groups = kv_cache_utils.get_kv_cache_groups(engine, dict(layers))
    names = list(layers)
    of_stages = []
    for stage in range(stages):
        first, end = get_pp_indices(len(names), stage, stages)
        held = {name: layers[name] for name in names[first:end]}
        of_stage = kv_cache_utils._project_kv_cache_groups_to_worker(groups, held)
        of_stages.append(
            kv_cache_utils.get_kv_cache_config_from_groups(engine, of_stage, request["memory"])
        )
    # vLLM takes the fewest blocks for all.
    fullest = min(of_stages, key=lambda one: one.num_blocks)
    tokens, requests = kv_cache_utils.get_kv_cache_capacity(engine, fullest)
    return tokens, requests


def specs(config: Any, block_tokens: int) -> dict[str, KVCacheSpec]:
    """The layers' cache, as vLLM's attention layers declare it."""
    layers = range(config.num_hidden_layers)
    if getattr(config, "kv_lora_rank", None):
        size = config.kv_lora_rank + config.qk_rope_head_dim
        return {
            f"layer.{layer}": MLAAttentionSpec(
                block_size=block_tokens, num_kv_heads=1, head_size=size, dtype=torch.bfloat16
            )
            for layer in layers
        }
    heads = config.num_attention_heads
    shape = {
        "block_size": block_tokens,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "dtype": torch.bfloat16,
    }
    if config.model_type == "falcon":
        before = 1 if config.multi_query else heads
        shape["num_kv_heads"] = config.num_kv_heads if config.new_decoder_architecture else before
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return {
        f"layer.{layer}": SlidingWindowSpec(**shape, sliding_window=window)
        if window and (kinds is None or kinds[layer] == "sliding_attention")
        else FullAttentionSpec(**shape)
        for layer in layers
    }


if __name__ == "__main__":
    main()
