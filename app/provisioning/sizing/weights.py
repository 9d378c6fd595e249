"""Bytes of a model's weights: in memory, and on disk."""

import dataclasses

from app.provisioning.sizing.facts import DTYPE_BYTES, ModelFacts, PlanError
from app.provisioning.sizing.quantization import BY_NAME, COMPRESSED_ON_LOAD


def weight_bytes(facts: ModelFacts, dtype: str) -> int:
    element = DTYPE_BYTES[dtype]
    if facts.stored_bytes is not None:
        stored = DTYPE_BYTES.get(facts.stored_dtype or "", element)
        return facts.stored_bytes if facts.quantization else facts.stored_bytes * element // stored
    if facts.quantization is None:
        return facts.parameters * element
    covered = facts.expert_parameters
    covered += 0 if facts.quantization.only_experts else facts.linear_parameters
    return int(covered * facts.quantization.bits / 8) + (facts.parameters - covered) * element


def disk_bytes(facts: ModelFacts) -> int:
    """Bytes that are read to load it: the checkpoint's, independent of the later quantization."""
    if facts.read_bytes is not None:
        return facts.read_bytes
    return facts.stored_bytes or weight_bytes(facts, facts.dtype)


def with_quantization(facts: ModelFacts, wanted: str | None) -> ModelFacts:
    """The facts with the requested quantization; None: as they are. Raises PlanError."""
    if wanted is None or (facts.quantization and facts.quantization.method == wanted):
        return facts
    if facts.quantization:
        raise PlanError(
            f"quantization: the model is quantized already, with {facts.quantization.method}"
        )
    if wanted not in BY_NAME:
        known = ", ".join(BY_NAME)
        raise PlanError(f"quantization: must be one of {known}, not {wanted[:40]!r}")
    quantization, on_load = BY_NAME[wanted], wanted in COMPRESSED_ON_LOAD
    on_disk = disk_bytes(facts)
    if on_load:
        note = (
            f"{wanted}: vLLM reads all {on_disk:,} bytes, and compresses them while it loads, to what "
            "the formula gives."
        )
    elif quantization.only_experts and not facts.expert_parameters:
        note = f"{wanted}: covers experts only, and this model has none: it changes nothing."
    else:
        note = f"{wanted}: vLLM needs a checkpoint that is compressed so; this one is not."
    # The checkpoint on disk differs from the loaded weights.
    return dataclasses.replace(
        facts,
        quantization=quantization,
        stored_bytes=None,
        read_bytes=on_disk if on_load else None,
        notes=(*facts.notes, note),
    )
