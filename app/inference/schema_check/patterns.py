"""Regular expressions of schemas, in a form that accepts at least what each engine's dialect accepts.

JSON schema has those of ECMA 262, in which `\\d` is an ASCII digit; llguidance has Rust's, in which it is a digit of any
script. The form here accepts each character beyond ASCII as a digit, as a letter and as white space.
"""

import re
from dataclasses import dataclass

_OTHERS = "\x80-\U0010ffff"  # beyond ASCII
_LEAST = {"d": "0-9", "w": "A-Za-z0-9_", "s": "\t-\r "}
_CONTROLS = "nrtfv"
_MAX_STATES = 4_000
_TOKEN = re.compile(
    r"(?P<members>\[(?P<negated>\^?)(?P<inner>(?:[^\]\[\\]|\\.)+)\])"
    r"|(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|(?P<open>\((?!\?)|\(\?:)|(?P<close>\))"
    r"|(?P<repeat>(?:[*+?]|\{(?P<least>\d{1,4})(?P<to>,(?P<most>\d{0,4}))?\})\??)"
    r"|(?P<dot>\.)|(?P<text>[^\\\[\](){}*+?.])",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_SET_OPERATIONS = ("&&", "--", "~~")  # of Rust's classes


@dataclass(slots=True, frozen=True)
class Pattern:
    """`states`: about how many an automaton of it has."""

    text: str
    states: int


def portable(pattern: str) -> Pattern | None:
    """The pattern in a form of all dialects; None if there is none, as for look-around and `\\p`."""
    parts: list[str] = []
    sizes: list[list[int]] = [[]]  # of the items, by open group
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        part = token and _translate(token)
        if token is None or part is None or not _measure(token, sizes):
            return None
        parts.append(part)
        at = token.end()
    if len(sizes) > 1 or (states := sum(sizes[0]) + 1) > _MAX_STATES:
        return None
    return Pattern("".join(parts), states)


def _measure(token: re.Match[str], sizes: list[list[int]]) -> bool:
    """Add an item to the sizes, or change the last one; false if the pattern is not valid."""
    if token["open"]:
        sizes.append([])
    elif token["close"]:
        if len(sizes) == 1:
            return False
        inner = sum(sizes.pop()) + 1
        sizes[-1].append(inner)
    elif token["repeat"]:
        if not sizes[-1]:
            return False
        times = max(int(token["least"] or 0), int(token["most"] or 0), 1)
        sizes[-1][-1] = min(sizes[-1][-1] * times, _MAX_STATES + 1)
    else:
        sizes[-1].append(1)
    return True


def _translate(token: re.Match[str]) -> str | None:
    if token["members"]:
        return _members(token["inner"], token["negated"])
    if token["escape"]:
        return _escape(token["escape"][1:])
    return r"[\s\S]" if token["dot"] else token[0]


def _members(inner: str, negated: str) -> str | None:
    """A class. A negated one accepts the most if it names the least."""
    if any(one in inner for one in _SET_OPERATIONS):
        return None
    parts: list[str] = []
    at = 0
    for escape in _ESCAPE.finditer(inner):
        name = escape[1]
        if name in _LEAST:
            part: str | None = _LEAST[name] + ("" if negated else _OTHERS)
        else:
            part = None if name in "DWSbB" else _escape(name)
        if part is None:
            return None
        parts += [inner[at : escape.start()], part]
        at = escape.end()
    return f"[{negated}{''.join(parts)}{inner[at:]}]"


def _escape(name: str) -> str | None:
    """A character outside of a class, or an escaped one in it, by the text behind its `\\`."""
    if name in _LEAST:
        return f"[{_LEAST[name]}{_OTHERS}]"
    if name.lower() in _LEAST:
        return f"[^{_LEAST[name.lower()]}]"
    if len(name) > 1:
        return re.escape(chr(int(name[1:], 16)))
    if name.isalnum():
        return f"\\{name}" if name in _CONTROLS else None
    return re.escape(name)
