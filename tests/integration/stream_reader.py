"""A client of result streams, with the checks that each event must pass."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse


@dataclass
class Reader:
    """A client that joins the text it reads by offsets, as documented."""

    text: str = ""
    attempt: int = 0
    attempts: list[int] = field(default_factory=list)
    position: str | None = None
    result: dict[str, Any] | None = None
    deltas: int = 0
    dropped: int = 0  # code points of lost attempts that do not count any more
    characters: int = 0  # code points of all deltas
    counts: list[tuple[str, int]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.result is not None

    def take(self, event: ServerSentEvent) -> None:
        data = json.loads(event.data)
        if event.event == "attempt":
            kept = data.get("continued_from", 0)
            assert kept <= len(self.text), "more is kept than was sent"
            assert event.id == f"{data['attempt']}:{kept}"
            self.dropped += len(self.text) - kept
            self.text, self.attempt = self.text[:kept], data["attempt"]
            self.attempts.append(self.attempt)
        elif event.event == "delta":
            assert event.id == f"{self.attempt}:{data['offset'] + len(data['text'])}"
            assert data["offset"] <= len(self.text), "a gap"
            self.text = self.text[: data["offset"]] + data["text"]
            self.characters += len(data["text"])
            self.deltas += 1
            if "completion_tokens" in data:
                self.counts.append((self.text, data["completion_tokens"]))
        else:
            assert event.event == data["state"]
            self.result = data
        self.position = event.id

    async def read(
        self, client: httpx.AsyncClient, result_id: str, most: int | None = None
    ) -> None:
        """Read on from where it was, to the end or for `most` events."""
        headers = {"Last-Event-ID": self.position} if self.position else {}
        path = f"/results/{result_id}/stream"
        async with aconnect_sse(client, "GET", path, headers=headers) as source:
            source.response.raise_for_status()
            count = 0
            async for event in source.aiter_sse():
                self.take(event)
                count += 1
                if count == most:
                    return
