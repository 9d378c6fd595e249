"""Stop sequences at the end of a text, which its client does not get."""

from collections.abc import Sequence


def matched_stop(text: str, finish_reason: str | None, stops: Sequence[str]) -> str | None:
    """The stop sequence that ended a text; the engine has left it at the text's end."""
    if finish_reason != "stop":
        return None
    return next((stop for stop in stops if text.endswith(stop)), None)


class StopFilter:
    """Holds back the end of a growing text as long as it may be a stop sequence.

    Its time grows with the text alone (the algorithm of Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is surely none of a stop sequence."""
        if not self._matchers:
            return text
        if len(text) >= self._longest:  # nothing before its end matters
            for matcher in self._matchers:
                matcher.matched = 0
        end = text[-self._longest :]
        count = max(matcher.feed(end) for matcher in self._matchers)
        text = self._held + text
        place = len(text) - count
        self._held = text[place:]
        return text[:place]

    def finish(self, stop: str | None) -> str:
        """The rest of the text, before the stop sequence that ended it."""
        return self._held.removesuffix(stop) if stop else self._held


class _Matcher:
    """Counts the characters at a text's end that begin a sequence."""

    def __init__(self, sequence: str) -> None:
        self.matched = 0
        self._sequence = sequence
        # By a number of matched characters: how many still match without the first of them.
        self._shorter = [0, 0]
        for place in range(1, len(sequence)):
            self._shorter.append(self._after(self._shorter[place], sequence[place]))

    def feed(self, text: str) -> int:
        for character in text:
            if self.matched == len(self._sequence):
                self.matched = self._shorter[self.matched]
            self.matched = self._after(self.matched, character)
        return self.matched

    def _after(self, matched: int, character: str) -> int:
        while matched and self._sequence[matched] != character:
            matched = self._shorter[matched]
        return matched + (self._sequence[matched] == character)
