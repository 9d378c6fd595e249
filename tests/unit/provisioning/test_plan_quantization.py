"""Weights by type and quantization, against the sizes of published checkpoints."""

from typing import Any

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.facts import GIB, PlanError
from app.provisioning.sizing.fit import Engine, plan
from app.provisioning.sizing.gpus import GPUS
from app.provisioning.sizing.weights import disk_bytes, weight_bytes, with_quantization
from tests.plan_configs import KNOWN

LLAMA = KNOWN["meta-llama/Meta-Llama-3-8B"].config
LLAMA_2 = KNOWN["meta-llama/Llama-2-7b-hf"].config
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def size(config: dict[str, Any], quantization: dict[str, Any] | None = None) -> int:
    added = {"quantization_config": quantization} if quantization else {}
    return weight_bytes(read_facts(config | added), "bfloat16")


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_weights_by_type(dtype: str, element: int) -> None:
    assert weight_bytes(read_facts(LLAMA), dtype) == 8_030_261_248 * element


# Sizes that are published of quantized checkpoints, in bytes. Within 1 %: tools differ in what they
# store beside the weights, and cards round.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    # https://huggingface.co/TheBloke/Llama-2-7B-Chat-GPTQ, branch gptq-4bit-128g-actorder_True
    "TheBloke/Llama-2-7B-Chat-GPTQ": (LLAMA_2, GPTQ, 3_900_000_000),
    # https://huggingface.co/TheBloke/meditron-7B-AWQ, a Llama 2
    "TheBloke/meditron-7B-AWQ": (LLAMA_2, AWQ, 3_890_000_000),
    # "total_size" of its model.safetensors.index.json
    "openai/gpt-oss-20b": (
        KNOWN["openai/gpt-oss-20b"].config,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        13_761_264_768,
    ),
    # vLLM's log after loading: "Loading model weights took 8.4927 GB", in GiB
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": (
        LLAMA,
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                }
            },
            "ignore": ["lm_head"],
        },
        int(8.4927 * GIB),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_quantized_checkpoints_have_their_published_size(name: str) -> None:
    config, quantization, published = PUBLISHED[name]
    assert size(config, quantization) == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (GPTQ, 4 + 20 / 128),
        (GPTQ | {"group_size": -1}, 4),
        (GPTQ | {"bits": 8}, 8 + 24 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "fp8"}, 8),
        (FP8_BLOCKS, 8 + 32 / 128**2),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True,
             "bnb_4bit_use_double_quant": True},
            4.127,
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "mxfp4"}, 4.25),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"}}
                },
            },
            8,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 4, "group_size": 128}},
                    "group_1": {"weights": None},
                },
            },
            4 + 16 / 128,
        ),
    ],
)  # fmt: skip
def test_bits_of_a_weight(quantization: dict[str, Any], bits: float) -> None:
    facts = read_facts(LLAMA | {"quantization_config": quantization})
    assert facts.quantization
    assert facts.quantization.bits == pytest.approx(bits)
    assert facts.quantization.method == quantization["quant_method"]


def test_what_is_not_linear_is_not_quantized() -> None:
    whole = read_facts(LLAMA)
    # 2 x embeddings, 65 norms of 4096.
    assert whole.parameters - whole.linear_parameters == 2 * 128256 * 4096 + 65 * 4096
    expected = whole.linear_parameters + 2 * (whole.parameters - whole.linear_parameters)
    assert size(LLAMA, {"quant_method": "fp8"}) == expected


def test_an_unknown_quantization_is_not_counted_and_noted() -> None:
    facts = read_facts(LLAMA | {"quantization_config": {"quant_method": "novel"}})
    assert facts.quantization is None
    assert any("The quantization (novel) is not known here" in note for note in facts.notes)


@pytest.mark.parametrize(
    ("config", "element"),
    [
        (GPTQ, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, 1),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            1,
        ),
    ],
)
def test_a_checkpoint_may_fix_the_caches_type(config: dict[str, Any], element: int | None) -> None:
    assert read_facts(LLAMA | {"quantization_config": config}).kv_bytes == element


def test_quantization_can_be_asked_for() -> None:
    facts, gpu = read_facts(LLAMA), GPUS["a100-80"]
    (plain,) = plan(facts, [gpu])
    (asked,) = plan(facts, [gpu], engine=Engine(quantization="fp8"))
    assert plain.weights == 2 * facts.parameters
    assert asked.weights == pytest.approx(9.08e9, rel=0.01)
    assert asked.cache - plain.cache == plain.weights - asked.weights


def test_a_second_quantization_is_refused() -> None:
    facts = read_facts(LLAMA | {"quantization_config": GPTQ})
    assert plan(facts, [GPUS["l4-24"]], engine=Engine(quantization="gptq"))[0].fits
    with pytest.raises(PlanError, match="quantization: the model is quantized already, with gptq"):
        plan(facts, engine=Engine(quantization="fp8"))


def test_gpus_that_lack_what_a_quantization_needs_are_reported() -> None:
    facts = read_facts(LLAMA_2 | {"quantization_config": AWQ})
    old, new = plan(facts, [GPUS["v100-16"], GPUS["t4-16"]])
    assert not old.fits
    assert old.verdict == "cannot run awq: it needs compute capability 7.5"
    assert new.fits
    assert new.weights < 4 * GIB


@pytest.mark.parametrize(
    ("name", "method", "note"),
    [
        ("meta-llama/Meta-Llama-3-8B", "fp8", "fp8: vLLM reads all 16,060,522,496 bytes, and comp"),
        ("meta-llama/Meta-Llama-3-8B", "awq", "awq: vLLM needs a checkpoint that is compressed so"),
        ("meta-llama/Meta-Llama-3-8B", "int8", "int8: vLLM needs a checkpoint that is compressed"),
        ("meta-llama/Meta-Llama-3-8B", "mxfp4", "mxfp4: covers experts only, and this model has n"),
        ("mistralai/Mixtral-8x7B-v0.1", "mxfp4", "mxfp4: vLLM needs a checkpoint that is compres"),
    ],
)
def test_what_a_quantization_means_for_a_plain_checkpoint_is_reported(
    name: str, method: str, note: str
) -> None:
    plain = read_facts(KNOWN[name].config)
    facts = with_quantization(plain, method)
    assert facts.quantization
    assert facts.quantization.method == method
    assert facts.notes[-1].startswith(note)
    assert (disk_bytes(facts) == disk_bytes(plain)) == ("vLLM needs" not in note)
    assert with_quantization(facts, method) is facts
