"""A storm as people read it."""

from collections import Counter
from collections.abc import Sequence

from tests.chaos.storm.outcome import Outcome


def to_markdown(outcome: Outcome) -> str:
    """Failures, load, ends, and each invariant with what was found against it."""
    options = outcome.options
    sections = [
        f"# A storm of {options.seconds:.0f} s",
        f"Seed `{options.seed}`, {options.crowd} clients, a failure every {options.pause:g} s.",
        "## Failures",
        _table(("what", "of", "times", "seconds"), _faults(outcome)),
        "## Load",
        _table(("dialect", "orders", "results"), _dialects(outcome)),
        _table(("answer", "times"), sorted(outcome.scene.log.answers.items())),
        "## Ends",
        _table(("ended as", "results"), sorted(outcome.ends.items())),
        _table(
            ("", ""),
            [
                (name, f"{value:,.4g}" if value % 1 else f"{value:,.0f}")
                for name, value in outcome.figures.items()
            ],
        ),
        "## Invariants",
        _table(("invariant", "cases", "violations"), _invariants(outcome)),
        *_violations(outcome),
    ]
    if outcome.missed:
        sections.append("Failures that found nothing to hurt: " + "; ".join(outcome.missed))
    return "\n\n".join(sections) + "\n"


def _faults(outcome: Outcome) -> Sequence[tuple[object, ...]]:
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    for fault in outcome.faults:
        counts[fault.what, fault.part] += 1
        seconds[fault.what, fault.part] += round(fault.seconds)
    return [(*key, count, seconds[key] or "") for key, count in sorted(counts.items())] + [
        ("all", "", sum(counts.values()), sum(seconds.values()))
    ]


def _dialects(outcome: Outcome) -> list[tuple[object, ...]]:
    orders = outcome.scene.log.orders
    counts = Counter(order.dialect for order in orders)
    results: Counter[str] = Counter()
    for order in orders:
        results[order.dialect] += len(order.ids)
    rows: list[tuple[object, ...]] = [
        (name, count, results[name]) for name, count in sorted(counts.items())
    ]
    return [*rows, ("all", len(orders), results.total())]


def _invariants(outcome: Outcome) -> list[tuple[object, ...]]:
    account = outcome.account
    names = [*account.checked, *(account.found.keys() - account.checked.keys())]
    return [
        (name, account.checked.get(name, 0), len(account.found.get(name, ()))) for name in names
    ]


def _violations(outcome: Outcome) -> list[str]:
    return [
        f"### {what}\n\n" + "\n".join(f"- {example}" for example in outcome.account.examples(what))
        for what, found in outcome.account.found.items()
        if found
    ]


def _table(head: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    def line(cells: tuple[object, ...]) -> str:
        return (
            "| "
            + " | ".join(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
            + " |"
        )

    return "\n".join([line(head), line(("---",) * len(head)), *map(line, rows)])
