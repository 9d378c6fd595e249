"""The baseline: an interpolated n-gram model with modified Kneser-Ney smoothing.

Works over any alphabet whose n-grams fit in 63 bits: bytes, or the tokens of the demo model.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Level:
    """Counts of one order. An n-gram is a number in base `alphabet`; its context is the quotient."""

    grams: Integers  # sorted
    counts: Integers  # occurrences at the highest order, distinct left neighbours below it
    discounts: Floats  # taken from n-grams counted 0, 1, 2, and 3 or more times
    contexts: Integers  # sorted
    totals: Integers  # of each context's counts
    backoffs: Floats  # probability each context leaves to the order below


class KneserNey:
    """Probability of each symbol after the `order` - 1 symbols before it."""

    def __init__(self, documents: list[Integers], order: int, alphabet: int) -> None:
        """Count `documents`, whose symbols are below `alphabet` - 1; the last one marks their ends."""
        self.order = order
        self.alphabet = alphabet
        self.levels: list[_Level] = []
        grams, counts = np.unique(self._grams(documents, order), return_counts=True)
        for length in range(order, 0, -1):
            self.levels.append(_level(grams, counts, alphabet))
            if length > 1:
                grams, counts = np.unique(grams % alphabet ** (length - 1), return_counts=True)

    def bits(self, documents: list[Integers]) -> float:
        """Information in `documents` and their ends under the model, in bits."""
        full = self._grams(documents, self.order)
        probability = np.full(len(full), 1 / self.alphabet)
        for length, level in zip(range(1, self.order + 1), reversed(self.levels), strict=True):
            grams = full % self.alphabet**length
            at, known = _find(level.contexts, grams // self.alphabet)
            count = _lookup(level.grams, level.counts, grams)
            discounted = np.maximum(count - level.discounts[np.minimum(count, 3)], 0)
            mixed = discounted / level.totals[at] + level.backoffs[at] * probability
            probability = np.where(known, mixed, probability)
        return float(-np.log2(probability).sum())

    def _grams(self, documents: list[Integers], length: int) -> Integers:
        """Every position's `length` symbols up to itself, as one number each, ends included."""
        end = self.alphabet - 1
        padding = np.full(length - 1, end)
        symbols = np.concatenate([np.concatenate((padding, each, [end])) for each in documents])
        grams = np.zeros(len(symbols) - length + 1, dtype=np.int64)
        for offset in range(length):
            grams = grams * self.alphabet + symbols[offset : offset + len(grams)]
        # Windows that reach into the next document's padding predict no symbol of a document.
        predicted = np.concatenate(
            [np.repeat([False, True], (length - 1, len(each) + 1)) for each in documents]
        )
        chosen: Integers = grams[predicted[length - 1 :]]
        return chosen


def _level(grams: Integers, counts: Integers, alphabet: int) -> _Level:
    contexts, starts = np.unique(grams // alphabet, return_index=True)
    discounts = _discounts(counts)
    totals = np.add.reduceat(counts, starts)
    removed = np.add.reduceat(discounts[np.minimum(counts, 3)], starts)
    return _Level(grams, counts, discounts, contexts, totals, removed / totals)


def _discounts(counts: Integers) -> Floats:
    """Chen and Goodman's discounts for counts of 0, 1, 2, and 3 or more."""
    of = [int((counts == count).sum()) for count in range(5)]
    if 0 in of[1:]:  # too little text, or single symbols: every one is seen often
        return np.array([0.0, 0.5, 0.5, 0.5])
    share = of[1] / (of[1] + 2 * of[2])
    return np.array(
        [0.0, *(count - (count + 1) * share * of[count + 1] / of[count] for count in (1, 2, 3))]
    )


def _find(sorted_keys: Integers, keys: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Index of each key (some valid one if it is missing), and a mask of those found."""
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return at, sorted_keys[at] == keys


def _lookup(sorted_keys: Integers, values: Integers, keys: Integers) -> Integers:
    at, known = _find(sorted_keys, keys)
    return np.where(known, values[at], 0)
