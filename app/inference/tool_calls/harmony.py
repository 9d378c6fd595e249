"""Messages to `functions.NAME` (gpt-oss): the reasoning format `harmony` reads them with all others."""

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import Source

FORMAT = Format(
    "harmony",
    lambda template: "<|channel|>" in template and "<|message|>" in template,
    Source.copy_rest,
)
