"""Parameters and cache of known models, against what is published of them."""

from typing import Any

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.facts import CacheLayers, ModelFacts, PlanError
from app.provisioning.sizing.families import FAMILIES
from tests.plan_configs import KNOWN

LLAMA = KNOWN["meta-llama/Meta-Llama-3-8B"].config


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_that_are_published(name: str) -> None:
    known = KNOWN[name]
    facts = read_facts(known.config)
    assert facts.is_known
    assert facts.parameters == known.parameters
    assert facts.active_parameters <= facts.parameters
    if known.active_parameters:
        assert facts.active_parameters == known.active_parameters
    parts = facts.linear_parameters + facts.expert_parameters + facts.replicated_parameters
    assert 0 < parts <= facts.parameters
    assert facts.kv_parameters <= facts.linear_parameters


@pytest.mark.parametrize("name", KNOWN)
def test_the_cache_of_a_token(name: str) -> None:
    known = KNOWN[name]
    shape = CacheShape(read_facts(known.config), gpus=1, element_bytes=2, in_flight=4096)
    assert shape.token_bytes == known.token_bytes


def test_every_kind_of_attention_is_among_the_known() -> None:
    facts = {name: read_facts(known.config) for name, known in KNOWN.items()}
    assert facts["facebook/opt-125m"].kv_heads == 12  # one for each head
    assert facts["tiiuae/falcon-7b"].kv_heads == 1  # multi-query
    assert facts["meta-llama/Llama-3.1-70B"].kv_heads == 8  # grouped
    assert facts["deepseek-ai/DeepSeek-V3"].is_latent
    assert {facts[name].model_type for name in KNOWN} <= set(FAMILIES)
    assert len({facts[name].model_type for name in KNOWN}) >= 8


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistralai/Mistral-7B-v0.1", {4096: 32}),
        ("mistralai/Mixtral-8x7B-v0.1", {None: 32}),
        ("microsoft/Phi-3-mini-4k-instruct", {2047: 32}),
        ("google/gemma-2-9b", {4096: 21, None: 21}),
        ("google/gemma-3-1b-pt", {512: 22, None: 4}),
        ("openai/gpt-oss-20b", {128: 12, None: 12}),
        ("Qwen/Qwen2.5-7B", {None: 28}),
    ],
)
def test_sliding_windows(name: str, windows: dict[int | None, int]) -> None:
    assert _windows(read_facts(KNOWN[name].config)) == windows


def test_layer_types_go_before_the_familys_pattern() -> None:
    config = KNOWN["google/gemma-2-9b"].config | {
        "layer_types": ["sliding_attention"] * 40 + ["full_attention"] * 2
    }
    assert _windows(read_facts(config)) == {4096: 40, None: 2}


def test_qwens_upper_layers_slide_where_it_is_turned_on() -> None:
    config = KNOWN["Qwen/Qwen2.5-7B"].config
    sliding = config | {"use_sliding_window": True, "max_window_layers": 21}
    assert _windows(read_facts(sliding)) == {131072: 7, None: 21}


def test_layers_that_keep_no_keys_and_values_are_reported() -> None:
    config = LLAMA | {
        "model_type": "some_hybrid",
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    }
    facts = read_facts(config)
    assert facts.cache == (CacheLayers(8, 8, 256),)
    assert any(
        "24 layers keep no keys and values (linear_attention)" in note for note in facts.notes
    )


def test_an_unknown_architecture_counts_as_a_generic_transformer_with_a_note() -> None:
    facts = read_facts(LLAMA | {"model_type": "novel"})
    assert not facts.is_known
    assert facts.parameters == KNOWN["meta-llama/Meta-Llama-3-8B"].parameters
    assert "'novel' is not known here" in facts.notes[0]


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {"model_type": "bert"},
        {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512},
        {"model_type": "novel", "is_encoder_decoder": True},
        {"model_type": "whisper"},
        {"model_type": "mamba2", "hidden_size": 768},
    ],
)
def test_what_is_no_decoder_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        read_facts(config)
    assert str(refused.value) == (
        f"model_type: {config['model_type']!r}: encoder, encoder-decoder and state-space models "
        "are not counted (docs/plan.md, Limits)"
    )


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (None, "config.json names no dtype: 16 bits are taken."),
        ("int3", "config.json names the dtype 'int3', unknown here: 16 bits are taken."),
    ],
)
def test_without_a_type_16_bits_are_taken(dtype: str | None, said: str) -> None:
    facts = read_facts(LLAMA | {"torch_dtype": dtype})
    assert facts.dtype == "bfloat16"
    assert facts.notes == (said,)


def test_an_unknown_architecture_may_have_experts_and_a_latent_cache() -> None:
    facts = read_facts(KNOWN["deepseek-ai/DeepSeek-V2-Lite"].config | {"model_type": "novel"})
    assert facts.parameters == KNOWN["deepseek-ai/DeepSeek-V2-Lite"].parameters
    assert facts.is_latent


def test_a_multimodal_model_is_its_language_model() -> None:
    # As https://huggingface.co/google/gemma-3-4b-it has it: the rest are the class's defaults.
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }  # fmt: skip
    facts = read_facts(config)
    # Its page counts SigLIP (416,866,032) and the projection of what that sees as well.
    assert facts.parameters == 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152)
    assert facts.dtype == "bfloat16"
    assert facts.max_context == 131_072
    assert _windows(facts) == {1024: 29, None: 5}
    assert any("Only the language model is counted" in note for note in facts.notes)


def _windows(facts: ModelFacts) -> dict[int | None, int]:
    return {layers.window: layers.count for layers in facts.cache}
