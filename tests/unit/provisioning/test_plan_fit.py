"""The fit of weights, overhead and cache on each GPU, against vLLM's reports."""

import dataclasses

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.facts import GIB, PlanError
from app.provisioning.sizing.fit import DEFAULT_CONTEXT, Engine, plan, plan_on
from app.provisioning.sizing.gpus import GPUS, find_gpus
from app.provisioning.sizing.resources import resources_for
from app.provisioning.sizing.weights import weight_bytes
from tests.plan_configs import KNOWN

LLAMA_8B = read_facts(KNOWN["meta-llama/Meta-Llama-3-8B"].config)
LLAMA_70B = read_facts(KNOWN["meta-llama/Llama-3.1-70B"].config)
A100 = GPUS["a100-80"]


# --- Against vLLM on GPUs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_gib", "gpus", "reported_weights", "reported_cache"),
    [
        # Llama 3 8B, "total_gpu_memory (79.14GiB) x gpu_memory_utilization (0.90) = 71.22GiB; model
        # weights take 14.99GiB; ... activation peak memory takes 1.19GiB; ... KV Cache is 54.93GiB"
        (79.14, 1, 14.99, 54.93),
        # https://github.com/vllm-project/vllm/pull/10511: the same, alone and on two GPUs
        (79.22, 1, 14.96, 53.29),
        (79.22, 2, 7.48, None),
    ],
)
def test_llama_3_8b_has_the_cache_that_vllm_reported(
    gpu_gib: float, gpus: int, reported_weights: float, reported_cache: float | None
) -> None:
    gpu = dataclasses.replace(A100, memory=int(gpu_gib * GIB))
    planned = plan_on(LLAMA_8B, gpu, gpus, context=8192, engine=Engine(gpu_memory_utilization=0.9))
    # The loaded weights include tables of rotations: 0.03 GiB.
    assert planned.weights / GIB == pytest.approx(reported_weights, abs=0.05)
    if reported_cache:
        assert planned.cache / GIB == pytest.approx(reported_cache, rel=0.04)


def test_a_small_gpu_has_the_cache_that_vllm_reported() -> None:
    """Llama 3.1 8B on an A10G, 22.07 GiB x 0.90: the cache was 4.60 GiB; the estimate is careful."""
    gpu = dataclasses.replace(GPUS["a10-24"], memory=int(22.07 * GIB))
    planned = plan_on(LLAMA_8B, gpu, 1, context=8192)
    assert 3.4 < planned.cache / GIB < 4.6


# --- Weights on each GPU -----------------------------------------------------------------------------


def test_the_sum_is_the_budget() -> None:
    (planned,) = plan(LLAMA_8B, [A100])
    assert planned.weights + planned.overhead + planned.cache == int(A100.memory * 0.9)
    assert planned.weights == weight_bytes(LLAMA_8B, "bfloat16") == 2 * 8_030_261_248


def test_gpus_hold_their_part_and_copies() -> None:
    weights = {gpus: plan_on(LLAMA_70B, A100, gpus).weights for gpus in (1, 2, 4, 8, 16)}
    for gpus in (2, 4, 8):
        copies = (gpus - 1) * 2 * LLAMA_70B.replicated_parameters
        assert gpus * weights[gpus] == pytest.approx(weights[1] + copies, abs=gpus)
    # Beyond 8 GPUs the 8 key-value heads are copied as well.
    assert 16 * weights[16] > weights[1] + 15 * 2 * LLAMA_70B.replicated_parameters


# --- The smallest number of GPUs ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "gpus"),
    [("t4", 16), ("l4", 8), ("a100-40", 8), ("a100-80", 2), ("h200-141", 2), ("b200-180", 1)],
)
def test_llama_70b_takes_as_many_gpus_as_it_needs(gpu: str, gpus: int) -> None:
    (planned,) = plan(LLAMA_70B, find_gpus(gpu), engine=Engine(max_gpus=16))
    assert planned.fits
    assert planned.gpus == gpus
    assert planned.verdict.startswith("fits")
    if gpus > 1:
        fewer = plan_on(LLAMA_70B, planned.gpu, gpus // 2)
        assert not fewer.fits
        assert fewer.resources is None


def test_little_to_spare_is_reported() -> None:
    verdicts = [plan_on(LLAMA_8B, A100, 1, 8192, requests).verdict for requests in (40, 54, 55)]
    assert verdicts == ["fits", "fits tightly", "holds 54 of 55 requests of 8192 tokens"]


def test_more_requests_take_more_gpus() -> None:
    gpus = [plan(LLAMA_8B, [A100], 8192, requests)[0].gpus for requests in (1, 54, 55, 200, 400)]
    assert gpus == sorted(gpus)
    assert gpus[0] == gpus[1] == 1
    assert gpus[2] == 2
    assert gpus[-1] > 2


def test_what_is_missing_is_reported() -> None:
    def verdict(gpu: str, context: int, concurrency: int, **engine: int) -> str:
        (planned,) = plan(
            LLAMA_70B, [GPUS[gpu]], context, concurrency, Engine(max_gpus=engine["max_gpus"])
        )
        assert not planned.fits
        return planned.verdict

    assert verdict("t4-16", 4096, 1, max_gpus=8) == (
        "lacks 5.7 GiB per GPU for weights and overhead"
    )
    assert verdict("a100-80", 131_072, 1, max_gpus=2) == (
        "lacks 17.0 GiB per GPU for one request of 131072 tokens"
    )
    assert verdict("a100-80", 8192, 100, max_gpus=4) == "holds 57 of 100 requests of 8192 tokens"


def test_many_requests_on_a_small_gpu_lack_room_for_their_overhead() -> None:
    opt = read_facts(KNOWN["facebook/opt-125m"].config)
    verdicts = [plan_on(opt, GPUS["t4-16"], 1, 2048, requests).verdict for requests in (1, 20_000)]
    assert verdicts == [
        "fits, in float16",
        "lacks 3.1 GiB per GPU for weights and overhead: request a lower concurrency",
    ]


def test_what_cannot_be_divided_is_reported() -> None:
    falcon = read_facts(KNOWN["tiiuae/falcon-7b"].config)
    (planned,) = plan(falcon, [GPUS["t4-16"]], 2048, 64)
    assert planned.gpus == 1
    assert planned.verdict.endswith("; 2 GPUs cannot share 71 attention heads")
    assert plan_on(falcon, A100, 2).verdict == "2 GPUs cannot share 71 attention heads"


def test_a_group_of_weights_is_not_divided() -> None:
    """Experts 768 wide, in blocks of 128: two GPUs have three each, four would have one and a half."""
    config = KNOWN["Qwen/Qwen3-30B-A3B"].config
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    facts = read_facts(config | {"quantization_config": blocks})
    assert plan_on(facts, A100, 2).fits
    refused = plan_on(facts, A100, 4)
    assert refused.verdict == "4 GPUs cannot share an inner width of 768 in groups of 128"
    assert plan_on(read_facts(config), A100, 4).fits


def test_key_value_heads_are_divided_or_copied_evenly() -> None:
    config = KNOWN["meta-llama/Llama-3.1-70B"].config | {
        "num_attention_heads": 48, "num_key_value_heads": 12, "hidden_size": 6144,
    }  # fmt: skip
    assert "12 key-value heads" in plan_on(read_facts(config), A100, 8).verdict
    assert plan_on(read_facts(config), A100, 4).verdict == "fits"


# --- Types --------------------------------------------------------------------------------------------


def test_older_gpus_compute_in_float16() -> None:
    (planned,) = plan(LLAMA_8B, [GPUS["v100-32"]])
    assert planned.dtype == "float16"
    assert planned.verdict == "fits, in float16"
    (asked,) = plan(LLAMA_8B, [GPUS["v100-32"]], engine=Engine(dtype="bfloat16"))
    assert asked.verdict == "has no bfloat16: take --dtype float16"


def test_float32_runs_in_16_bits_unless_asked_for() -> None:
    gemma = read_facts(KNOWN["google/gemma-2-9b"].config)
    (planned,) = plan(gemma, [A100])
    (asked,) = plan(gemma, [A100], engine=Engine(dtype="float32"))
    assert planned.dtype == "bfloat16"
    assert asked.weights == 2 * planned.weights
    assert asked.token_bytes == 2 * planned.token_bytes


def test_an_8_bit_cache_holds_twice_as_much() -> None:
    (plain,) = plan(LLAMA_8B, [A100])
    (small,) = plan(LLAMA_8B, [A100], engine=Engine(kv_cache_dtype="fp8"))
    assert small.cache == plain.cache
    assert small.tokens == pytest.approx(2 * plain.tokens, rel=0.001)


# --- Requests -----------------------------------------------------------------------------------------


def test_the_context_is_the_models_but_not_too_long() -> None:
    assert plan(LLAMA_70B, [A100])[0].context == DEFAULT_CONTEXT
    opt = read_facts(KNOWN["facebook/opt-125m"].config)
    assert plan(opt, [A100])[0].context == 2048


@pytest.mark.parametrize(
    ("context", "concurrency", "engine", "message"),
    [
        (8193, 1, Engine(), "context: 8193 tokens are more than the model's 8192 (max_position"),
        (0, 1, Engine(), "context: must be a whole number from 1 to"),
        (True, 1, Engine(), "context: must be a whole number from 1 to"),
        (1, 0, Engine(), "concurrency: must be a whole number from 1 to 1000000, not 0"),
        (1, 10**9, Engine(), "concurrency: must be"),
        (
            1,
            1,
            Engine(dtype="int3"),
            "dtype: must be one of float32, bfloat16, float16, not 'int3'",
        ),
        (1, 1, Engine(quantization="x"), "quantization: must be one of awq, "),
        (1, 1, Engine(kv_cache_dtype="x"), "kv_cache_dtype: must be one of auto, fp8"),
        (
            1,
            1,
            Engine(gpu_memory_utilization=1.5),
            "gpu_memory_utilization: must be above 0, and at most 1 (for example 0.9), not 1.5",
        ),
        (1, 1, Engine(gpu_memory_utilization=float("nan")), "gpu_memory_utilization: must be"),
        (1, 1, Engine(max_gpus=0), "max_gpus: must be a whole number"),
        (1, 1, Engine(max_num_batched_tokens=0), "max_num_batched_tokens: must be"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    context: int, concurrency: int, engine: Engine, message: str
) -> None:
    with pytest.raises(PlanError) as refused:
        plan(LLAMA_8B, [A100], context, concurrency, engine)
    assert str(refused.value).startswith(message)


def test_gpus_are_found_by_their_beginning() -> None:
    assert find_gpus("T4") == [GPUS["t4-16"]]
    assert find_gpus("a10") == [GPUS["a10-24"]]
    assert find_gpus("h200-141") == [GPUS["h200-141"]]
    assert find_gpus("a100") == [GPUS["a100-40"], GPUS["a100-80"]]
    with pytest.raises(PlanError, match="'tpu' is not a known GPU: there are t4-16, "):
        find_gpus("tpu")


def test_all_gpus_by_default_each_once() -> None:
    planned = plan(LLAMA_8B)
    assert [one.gpu.name for one in planned] == list(GPUS)
    assert all(one.fits for one in planned)


def test_what_to_ask_a_scheduler_for() -> None:
    asked = plan_on(LLAMA_70B, A100, 4, serve_minutes=120).resources
    assert asked == resources_for(2 * 70_553_706_496, 4, 120)
    assert asked.gres == "gpu:4"
    assert asked.cpu_cores == 12
    # 8 + 4 x 4 + 141.1 GB, in steps of 8; 120 + 3 + 141.1 GB at 0.5 GB/s, in steps of 10.
    assert asked.memory_gb == 168
    assert asked.minutes == 130


def test_memory_for_reading_is_requested_in_every_case() -> None:
    """Compressed while loading, the file is as large as before; a compressed one is not."""
    plain = plan_on(LLAMA_70B, A100, 4).resources
    asked = {
        method: plan_on(LLAMA_70B, A100, 4, engine=Engine(quantization=method)).resources
        for method in ("fp8", "bitsandbytes", "gptq")
    }
    assert plain
    assert asked["fp8"] == asked["bitsandbytes"] == plain
    assert asked["gptq"]
    assert asked["gptq"].memory_gb < plain.memory_gb - 90
    # A file of 32 bits is read whole, and becomes 16.
    gemma = read_facts(KNOWN["google/gemma-2-9b"].config)
    assert plan_on(gemma, A100, 1).resources == resources_for(4 * gemma.parameters, 1, 60)
