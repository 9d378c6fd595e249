"""The cache: blocks as vLLM gives them out, and what it reported for known models."""

import pytest

from app.provisioning.sizing.architecture import read_facts
from app.provisioning.sizing.cache import CacheShape
from app.provisioning.sizing.facts import GIB
from tests.plan_configs import KNOWN

IN_FLIGHT = 4096


def shape(name: str, gpus: int = 1, element_bytes: int = 2) -> CacheShape:
    return CacheShape(read_facts(KNOWN[name].config), gpus, element_bytes, IN_FLIGHT)


@pytest.mark.parametrize(
    ("name", "gib", "tokens", "context", "requests"),
    [
        # Llama 3.1 8B on an A10G: "reserved for KV Cache is 4.60GiB", 2356 "CUDA blocks", and 0.29x
        # as its "Maximum concurrency for 131072 tokens per request"
        ("meta-llama/Meta-Llama-3-8B", 4.60, 2356 * 16, 131_072, 0.29),
        # The same on an RTX A5000: "Available KV cache memory: 5.29 GiB", "43,296 tokens"
        ("meta-llama/Meta-Llama-3-8B", 5.29, 43_296, 2048, 21.14),
        # "Available KV cache memory: 18.69 GiB", "GPU KV cache size: 136,080 tokens", and 3.32x
        ("Qwen/Qwen3-8B", 18.69, 136_080, 40_960, 3.32),
    ],
)
def test_tokens_are_those_that_vllm_reported(
    name: str, gib: float, tokens: int, context: int, requests: float
) -> None:
    """From logs of vLLM 0.8 to 0.10 that users published; the GiB are rounded to 0.01."""
    cache = shape(name)
    least, most = (cache.tokens(int((gib + error) * GIB), context) for error in (-0.005, 0.005))
    assert least <= tokens <= most
    assert most - least < 200
    assert round(cache.requests(tokens * cache.token_bytes, context), 2) == requests


def test_a_request_takes_whole_blocks() -> None:
    cache = shape("meta-llama/Meta-Llama-3-8B")
    assert cache.request_bytes(16) == cache.request_bytes(1) == 16 * 131_072
    assert cache.request_bytes(17) == 2 * 16 * 131_072
    assert cache.requests(10 * 16 * 131_072, 32) == 5
    assert cache.requests(10 * 16 * 131_072 - 1, 32) == 4.5
    assert cache.tokens(10 * 16 * 131_072, 32) == 160


def test_no_memory_holds_nothing() -> None:
    cache = shape("meta-llama/Meta-Llama-3-8B")
    assert cache.requests(-1, 4096) == cache.requests(0, 4096) == 0
    assert cache.tokens(-GIB, 4096) == 0


def test_gpus_share_key_value_heads_and_copy_the_last_one() -> None:
    whole = KNOWN["meta-llama/Llama-3.1-70B"].token_bytes
    sizes = {gpus: shape("meta-llama/Llama-3.1-70B", gpus).token_bytes for gpus in (1, 2, 8, 16)}
    assert sizes == {1: whole, 2: whole // 2, 8: whole // 8, 16: whole // 8}


def test_a_latent_cache_is_held_by_every_gpu() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    assert shape(name, 8).token_bytes == shape(name).token_bytes == 61 * (512 + 64) * 2


def test_eight_bits_are_half() -> None:
    name = "Qwen/Qwen2.5-7B"
    assert 2 * shape(name, element_bytes=1).token_bytes == shape(name).token_bytes


def test_a_window_bounds_what_a_request_takes() -> None:
    """All layers of Mistral 7B: the window, what is under way, and a block that is begun."""
    cache = shape("mistralai/Mistral-7B-v0.1")
    tokens = 4096 - 1 + IN_FLIGHT
    assert cache.request_bytes(32_768) == cache.request_bytes(16_384)
    assert cache.request_bytes(32_768) == (-(-tokens // 16) + 1) * 16 * 131_072


def test_windows_and_full_layers_share_the_memory() -> None:
    """Gemma 2 9B: 21 layers see 4096 tokens, 21 see all; a block is of 21 layers."""
    cache = shape("google/gemma-2-9b")
    layer_block = 16 * 2 * 8 * 256 * 2
    blocks = 8192 // 16 + (-(-(4095 + IN_FLIGHT) // 16) + 1)
    assert cache.request_bytes(8192) == blocks * 21 * layer_block
    assert cache.token_bytes == 42 * layer_block // 16


def test_uneven_groups_are_filled_up() -> None:
    """Gemma 3 1B: 4 full layers and 22 with windows are 1 + 6 groups of 4, two places unused."""
    cache = shape("google/gemma-3-1b-pt")
    layer_block = 16 * 2 * 1 * 256 * 2
    window_blocks = -(-(511 + IN_FLIGHT) // 16) + 1
    assert cache.request_bytes(32_768) == (2048 + 6 * window_blocks) * 4 * layer_block


def test_groups_that_are_nearly_even_become_one_size() -> None:
    config = KNOWN["google/gemma-2-9b"].config | {
        "num_hidden_layers": 25,
        "layer_types": ["sliding_attention"] * 12 + ["full_attention"] * 13,
    }
    cache = CacheShape(read_facts(config), 1, 2, IN_FLIGHT)
    assert cache.request_bytes(16) == (1 + 2) * 13 * 16 * 2 * 8 * 256 * 2
