"""Layers by their part of the cache: every token, a sliding window, or none."""

from collections import Counter

from app.provisioning.sizing.facts import CacheLayers, PlanError
from app.provisioning.sizing.families import Family
from app.provisioning.sizing.members import Members

MAX_WINDOW = 1 << 31


def cache_layers(
    config: Members, family: Family, layers: int, kv_heads: int, head_elements: int
) -> tuple[tuple[CacheLayers, ...], list[str]]:
    """The layers by their window, and notes on them. Raises PlanError."""
    counts, notes = _counts(config, family, layers)
    if not any(counts.values()):
        raise PlanError(
            f"{config.name_of('layer_types')}: no layer keeps keys and values: such models are not "
            "calculated here"
        )
    return (
        tuple(
            CacheLayers(count, kv_heads, head_elements, window)
            for window, count in sorted(counts.items(), key=lambda item: item[0] or 0)
            if count
        ),
        notes,
    )


def _counts(
    config: Members, family: Family, layers: int
) -> tuple[dict[int | None, int], list[str]]:
    """Number of layers by the size of their window in tokens (None: all)."""
    window = config.number("sliding_window", low=0, high=MAX_WINDOW, default=0) or None
    if not config.flag("use_sliding_window", default=family.windows != "upper"):
        window = None
    kinds = config.texts("layer_types", layers)
    if kinds is not None:
        return _by_kind(Counter(kinds), window, config)
    if window is None or family.windows == "none":
        return {None: layers}, []
    if family.windows == "all":
        return {window: layers}, []
    if family.windows == "even":
        sliding = (layers + 1) // 2
    elif family.windows == "upper":
        first = config.number("max_window_layers", low=0, high=MAX_WINDOW, default=layers)
        sliding = max(0, layers - first)
    else:
        pattern = config.number("sliding_window_pattern", high=layers + 1, default=family.pattern)
        sliding = layers - layers // pattern
    return {window: sliding, None: layers - sliding}, []


def _by_kind(
    kinds: Counter[str], window: int | None, config: Members
) -> tuple[dict[int | None, int], list[str]]:
    counts: dict[int | None, int] = {
        None: kinds.pop("full_attention", 0) + kinds.pop("attention", 0)
    }
    sliding = kinds.pop("sliding_attention", 0)
    counts[window] = counts.get(window, 0) + sliding
    if chunked := kinds.pop("chunked_attention", 0):
        chunk = config.number("attention_chunk_size", high=MAX_WINDOW)
        counts[chunk] = counts.get(chunk, 0) + chunked
    if rest := kinds.total():
        named = ", ".join(sorted(kinds))[:100]
        return counts, [
            f"{rest} layers keep no keys and values ({named}): what they keep of each request "
            "instead is not counted."
        ]
    return counts, []
