"""Lines of JSON, whole for every reader.

JSON may hold U+0085, U+2028 and U+2029 as they are. Python's `splitlines`, `iter_lines` of its HTTP clients and
other readers end a line there: written as escapes they are the same values, on one line.
"""


def on_one_line(text: bytes) -> bytes:
    """Escape the line ends that JSON texts in UTF-8 may hold."""
    # Nearly all texts have none. To look for a single byte costs a twentieth of a search for several.
    if text.isascii():
        return text
    if 0xC2 in text and 0x85 in text:
        text = text.replace(b"\xc2\x85", b"\\u0085")
    if 0xE2 in text and (0xA8 in text or 0xA9 in text):
        text = text.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return text
