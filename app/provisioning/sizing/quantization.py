"""Size of weights by the `quantization_config` of a config.json.

A scale is shared by a group of weights, so a weight of b bits takes b + (bits of scale and zero) /
group. The formats: GPTQ and AWQ (https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/casper-hansen/AutoAWQ),
bitsandbytes NF4 (https://arxiv.org/abs/2305.14314: blocks of 64; 0.5 bits a weight, 0.127 if the
scales are quantized again), FP8 by blocks (https://arxiv.org/abs/2412.19437, section 3.3), MXFP4
(OCP Microscaling: 8 bits for 32), NVFP4 (8 bits for 16), compressed-tensors
(https://github.com/neuralmagic/compressed-tensors). Least compute capabilities are those that
vLLM's `get_min_capability` returns.
"""

from collections.abc import Mapping

from app.provisioning.sizing.facts import PlanError, Quantization
from app.provisioning.sizing.members import Members

_SCALE_BITS = 16

# Meaning of `--quantization` for a model that is not quantized: each method's usual form.
BY_NAME: Mapping[str, Quantization] = {
    "awq": Quantization("awq", 4 + (_SCALE_BITS + 4) / 128, 128, capability=(7, 5)),
    "bitsandbytes": Quantization("bitsandbytes", 4.5),
    "fp8": Quantization("fp8", 8, capability=(7, 5)),
    "gptq": Quantization("gptq", 4 + (_SCALE_BITS + 4) / 128, 128, capability=(6, 0)),
    "int8": Quantization("int8", 8),
    "mxfp4": Quantization("mxfp4", 4.25, 32, only_experts=True, capability=(8, 0)),
}
# The methods that vLLM applies while it loads; the others need a compressed checkpoint.
COMPRESSED_ON_LOAD = ("bitsandbytes", "fp8")


def read_quantization(source: Members) -> tuple[Quantization | None, int | None, list[str]]:
    """The weights' quantization, bytes of an element in the cache if it fixes them, and notes.

    Raises PlanError.
    """
    if not source.has("quantization_config"):
        return None, None, []
    config = source.inner("quantization_config")
    method = config.text("quant_method", default="modelopt" if config.has("quant_algo") else "")
    readers = {
        "gptq": _gptq,
        "awq": _awq,
        "fp8": _fp8,
        "fbgemm_fp8": lambda _: Quantization("fbgemm_fp8", 8, capability=(8, 0)),
        "bitsandbytes": _bitsandbytes,
        "compressed-tensors": _compressed_tensors,
        "mxfp4": lambda _: BY_NAME["mxfp4"],
        "modelopt": _modelopt,
    }
    reader = readers.get(method)
    quantization = reader(config) if reader else None
    if quantization is None:
        shown = method or "without a quant_method"
        return None, None, [
            f"The quantization ({shown}) is not known here: weights are counted without it, which "
            "is too much."
        ]  # fmt: skip
    return quantization, _cache_bytes(config), []


def _gptq(config: Members) -> Quantization:
    bits = config.number("bits", high=16)
    return Quantization("gptq", *_grouped(bits, _group(config, "group_size"), _SCALE_BITS + bits),
                        capability=(6, 0))  # fmt: skip


def _awq(config: Members) -> Quantization:
    bits = config.number("bits", "w_bit", high=16)
    group = _group(config, "group_size", "q_group_size")
    return Quantization("awq", *_grouped(bits, group, _SCALE_BITS + bits), capability=(7, 5))


def _fp8(config: Members) -> Quantization:
    block = config.numbers("weight_block_size", 1 << 16)
    if not block:
        return BY_NAME["fp8"]
    if len(block) != 2 or 0 in block:
        raise PlanError("quantization_config.weight_block_size: must be two numbers above 0")
    return Quantization("fp8", 8 + 32 / (block[0] * block[1]), block[0], capability=(7, 5))


def _bitsandbytes(config: Members) -> Quantization | None:
    if config.flag("load_in_8bit", default=False):
        return Quantization("bitsandbytes", 8)
    if not config.flag("load_in_4bit", default=False):
        return None
    twice = config.flag("bnb_4bit_use_double_quant", default=False)
    return Quantization("bitsandbytes", 4.127 if twice else 4.5)


def _compressed_tensors(config: Members) -> Quantization | None:
    """The widest of its groups, so that the sum is rather too large."""
    if not config.has("config_groups"):
        return None
    groups = config.inner("config_groups")
    found = []
    for name in groups.names(64):
        group = groups.inner(name)
        if not group.has("weights"):
            continue
        weights = group.inner("weights")
        bits = weights.number("num_bits", high=16)
        found.append(_grouped(bits, _group(weights, "group_size"), _SCALE_BITS))
    if not found:
        return None
    return Quantization("compressed-tensors", *max(found), capability=(7, 0))


def _modelopt(config: Members) -> Quantization | None:
    algorithm = config.text("quant_algo").upper()
    known = {
        "FP8": Quantization("modelopt", 8, capability=(8, 0)),
        "NVFP4": Quantization("modelopt", 4.5, 16, capability=(7, 5)),
        "MXFP8": Quantization("modelopt", 8.25, 32, capability=(8, 0)),
    }
    return known.get(algorithm)


def _cache_bytes(config: Members) -> int | None:
    """vLLM uses an 8-bit cache if the checkpoint has scales for one."""
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
        return 1
    algorithm = config.get("kv_cache_quant_algo")
    return 1 if isinstance(algorithm, str) and algorithm.upper() == "FP8" else None


def _group(config: Members, *names: str) -> int:
    """Weights that share a scale; 1 for a whole row (group size -1 or none)."""
    value = config.number(*names, low=-1, high=1 << 24, default=-1)
    return max(1, value)


def _grouped(bits: int, group: int, extra: int) -> tuple[float, int]:
    return (bits + extra / group if group > 1 else float(bits)), group
