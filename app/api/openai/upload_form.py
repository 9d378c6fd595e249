"""Streaming parser of an upload: multipart/form-data (RFC 7578), one file and a few small fields."""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from app.core.errors import MediaTypeError, invalid_field

_MAX_FIELDS = 32
_MAX_FIELD_BYTES = 4_096


class UploadForm:
    """Parses a body piece by piece; keeps the fields, and returns the file's bytes."""

    def __init__(self, content_type: str) -> None:
        """Raises MediaTypeError unless the body is such a form."""
        media_type, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if media_type != b"multipart/form-data" or not boundary:
            raise MediaTypeError("Send the file as `multipart/form-data`, with its boundary.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # once the file has begun
        self._is_complete = False
        self._file = bytearray()
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._name = ""
        self._value = bytearray()
        self._is_file = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, piece: bytes) -> bytes:
        """Parse a piece and return the file's bytes in it. Raises InvalidRequestError."""
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise invalid_field("body", f"is no form: {error}") from error
        content = bytes(self._file)
        self._file.clear()
        return content

    def close(self) -> None:
        """Raise InvalidRequestError if the body ended before the form did."""
        if not self._is_complete:
            raise invalid_field("body", "the form ends before its last boundary")

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._disposition = b""
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        self._value.clear()
        if self._is_file:
            if self.filename is not None:
                raise invalid_field("file", "may be given once")
            self.filename = _clean(options.get(b"filename", b"")) or "file"

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > _MAX_FIELD_BYTES:
            raise invalid_field(self._name or "body", f"may have at most {_MAX_FIELD_BYTES} bytes")

    def _on_part_end(self) -> None:
        if not self._is_file:
            if len(self.fields) == _MAX_FIELDS:
                raise invalid_field("body", f"may have at most {_MAX_FIELDS} fields")
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._is_complete = True


def _clean(name: bytes) -> str:
    """The file's name without a path, and only with characters that PostgreSQL and headers can hold."""
    text = name.decode("utf-8", "replace").replace("\\", "/").rsplit("/", 1)[-1]
    return "".join(character for character in text if character.isprintable())
