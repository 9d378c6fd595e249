"""Images by URL: fetched once, when a request is accepted, and kept as data URIs (docs/vision.md#urls)."""

import asyncio
import base64
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

import httpx

from app.core.byte_budget import read_within
from app.core.errors import InvalidRequestError
from app.core.guarded_client import GuardedClient
from app.core.off_loop import off_loop
from app.core.settings import Settings
from app.core.url_guard import Lookup, RefusedTargetError, UrlRules, url_fault
from app.core.waiting import cancel_all
from app.inference.images import BEGINNINGS, IMAGES, is_remote, measure, uris_of
from app.results.drafts import check_image_count, invalid

_ACCEPT = {"accept": ", ".join(BEGINNINGS)}
_PLACES = 64  # images that one process fetches at a time
_PLACES_OF_TEAM = 8
_PREFIX = len("data:image/jpeg;base64,")
_MAX_WORDS = 200
_OFF = "URLs are not fetched (LLM_IMAGE_URLS=off): send the image as a data URI, or as base64"

Messages = list[dict[str, Any]]


class _FaultError(Exception):
    """The reason why an image is not taken."""


class ImageUrls:
    """Fetches images of clients' URLs. One a process; used inside `async with`."""

    def __init__(self, settings: Settings, lookup: Lookup = socket.getaddrinfo) -> None:
        self._rules = UrlRules(settings.image_urls == "any", "LLM_IMAGE_URLS=any")
        self._seconds = settings.image_url_timeout_seconds
        self._most_characters = settings.max_body_bytes
        self._most_images = settings.max_images
        self._places = asyncio.Semaphore(_PLACES)
        self._places_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._client: GuardedClient | None = None
        if settings.image_urls != "off":
            self._client = GuardedClient("image-dns", self._rules, self._seconds, lookup)

    async def __aenter__(self) -> "ImageUrls":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.__aexit__()

    async def fetched(self, team_id: str, messages: Messages) -> Messages:
        """The messages with data URIs in the place of URLs; each URL is fetched once.

        Raises InvalidRequestError, and MemoryBusyError.
        """
        places = Counter(filter(is_remote, uris_of(messages)))
        if not places:
            return messages
        if self._client is None:
            raise invalid("messages", _OFF)
        check_image_count(measure(messages), self._most_images)
        for url in places:
            if fault := url_fault(url, self._rules):
                raise _refused(url, fault)
        most = self._most_characters - sum(
            _PREFIX if is_remote(uri) else len(uri) for uri in uris_of(messages)
        )
        if most <= 0:
            raise invalid("messages", _too_large(self._most_characters))
        room = _Room(most * 3 // 4, self._most_characters)
        found, _ = await read_within(
            most, lambda: self._fetch_all(team_id, places, room), lambda found: _size(found, places)
        )
        return [_with_images(message, found) for message in messages]

    async def _fetch_all(
        self, team_id: str, places: Mapping[str, int], room: "_Room"
    ) -> dict[str, str]:
        tasks = [
            asyncio.create_task(self._fetch(team_id, url, room, count))
            for url, count in places.items()
        ]
        try:
            async with asyncio.timeout(self._seconds):
                return dict(zip(places, await asyncio.gather(*tasks), strict=True))
        except TimeoutError:
            slow = [url for url, task in zip(places, tasks, strict=True) if not _is_read(task)]
            raise _refused((slow or [*places])[0], self._too_slow) from None
        finally:
            await cancel_all(tasks)

    async def _fetch(self, team_id: str, url: str, room: "_Room", count: int) -> str:
        """The image as a data URI. Raises InvalidRequestError."""
        of_team = self._places_of.get(team_id)
        if of_team is None:
            of_team = self._places_of[team_id] = asyncio.Semaphore(_PLACES_OF_TEAM)
        try:
            async with of_team, self._places:
                media_type, content = await self._get(team_id, url, room, count)
        except (_FaultError, RefusedTargetError) as error:
            raise _refused(url, str(error)) from None
        except httpx.TimeoutException:
            raise _refused(url, self._too_slow) from None
        except socket.gaierror as error:
            raise _refused(url, f"the name cannot be resolved: {error.strerror}") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            raise _refused(url, f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        encoded = await off_loop(len(content), lambda: base64.b64encode(content).decode())
        return f"data:{media_type};base64,{encoded}"

    async def _get(self, team_id: str, url: str, room: "_Room", count: int) -> tuple[str, bytes]:
        assert self._client is not None
        async with self._client.call(team_id, "GET", url, _ACCEPT) as response:
            media_type = _media_type(response)
            content = await room.read(response.aiter_raw(), count)
        if not content.startswith(BEGINNINGS[media_type]):
            raise _FaultError(f"the content is not of type {media_type}")
        return media_type, content

    @property
    def _too_slow(self) -> str:
        return f"was not read within {self._seconds:g} s (LLM_IMAGE_URL_TIMEOUT_SECONDS)"


@dataclass(slots=True)
class _Room:
    """Bytes that the images of one request may still have together."""

    left: int
    most_characters: int  # for the message

    async def read(self, pieces: AsyncIterator[bytes], count: int) -> bytes:
        """Read a body that stands in `count` places."""
        content = bytearray()
        async for piece in pieces:
            self.left -= len(piece) * count
            if self.left < 0:
                raise _FaultError(_too_large(self.most_characters))
            content += piece
        return bytes(content)


def refuse_urls(messages: Iterable[Mapping[str, Any]] | None, place: str) -> None:
    """Raise InvalidRequestError for images by URL in a place whose requests have no client that waits."""
    if any(map(is_remote, uris_of(messages or ()))):
        raise invalid("messages", f"URLs of images are not fetched in {place}: send data URIs")


def _media_type(response: httpx.Response) -> str:
    """The type of an image. Raises _FaultError for another response."""
    if response.is_redirect:
        raise _FaultError(f"answered {response.status_code}: redirects are not followed")
    if response.status_code != HTTPStatus.OK:
        raise _FaultError(f"answered {response.status_code}")
    given = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in BEGINNINGS:
        raise _FaultError(
            f"has the content type {given[:80]!r}, not one of {', '.join(BEGINNINGS)}"
        )
    if (encoding := response.headers.get("content-encoding", "identity").lower()) != "identity":
        raise _FaultError(f"has the content encoding {encoding[:40]!r}, which is not read")
    return str(given)


def _is_read(task: "asyncio.Task[str]") -> bool:
    return task.done() and not task.cancelled()


def _size(found: Mapping[str, str], places: Mapping[str, int]) -> int:
    return sum(len(found[url]) * count for url, count in places.items())


def _with_images(message: dict[str, Any], found: Mapping[str, str]) -> dict[str, Any]:
    images: Sequence[dict[str, Any]] = message.get(IMAGES, ())
    if not any(one["url"] in found for one in images):
        return message
    return message | {IMAGES: [one | {"url": found.get(one["url"], one["url"])} for one in images]}


def _too_large(most: int) -> str:
    return f"the images of a request have at most {most} bytes as data URIs (LLM_MAX_BODY_BYTES)"


def _refused(url: str, fault: str) -> InvalidRequestError:
    """The error of one image: its host names it, because a path may hold secrets."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:
        host = "an unknown host"
    words = f"the image of {host}: {fault}"
    line = "".join(one for one in " ".join(words.split()) if one.isprintable())
    return invalid("messages", line[:_MAX_WORDS])
