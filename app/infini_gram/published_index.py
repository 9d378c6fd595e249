"""The files of a published index: by S3's public listing of a bucket, or by their names below an URL."""

import asyncio
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx

from app.infini_gram.manifest import KINDS, NEEDED

S3_ENDPOINT = "https://s3.amazonaws.com"
MAX_ATTEMPTS = 8  # without progress
_MAX_PAUSE_SECONDS = 30.0
_MAX_PAGES = 100  # of 1,000 keys each
_MAX_SHARDS = 10_000
_NAME = re.compile(rf"({'|'.join(KINDS)})\.(0|[1-9]\d{{0,3}})")
_MD5 = re.compile(r"[0-9a-f]{32}")  # the ETag of an object that was uploaded in one part
_GONE = (403, 404, 410)  # S3 returns 403 for a missing object if listing is forbidden
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(Exception):
    """The download cannot continue; the message is one line."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of the index. `etag` is empty if the server has none; `md5` is known for some."""

    name: str
    url: str
    size: int
    etag: str
    md5: str | None


@dataclass(frozen=True, slots=True)
class Http:
    """The client, and the pause after a first failure; each next one doubles."""

    client: httpx.AsyncClient
    first_pause: float = 0.5

    async def pause(self, failures: int, response: httpx.Response | None = None) -> None:
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        seconds = float(asked) if asked.isdecimal() else self.first_pause * 2 ** (failures - 1)
        await asyncio.sleep(min(seconds, _MAX_PAUSE_SECONDS))

    async def send(
        self, method: str, url: str, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """A response that is not transient. Raises DownloadError after MAX_ATTEMPTS."""
        problem = ""
        for failures in range(1, MAX_ATTEMPTS + 1):
            response = None
            try:
                response = await self.client.request(method, url, params=params)
            except httpx.TransportError as error:
                problem = describe(error)
            if response is not None:
                if not is_transient(response):
                    return response
                problem = f"status {response.status_code}"
            if failures < MAX_ATTEMPTS:
                await self.pause(failures, response)
        raise DownloadError(f"{url}: {problem}, in {MAX_ATTEMPTS} attempts")


def is_transient(response: httpx.Response) -> bool:
    return response.status_code in _TRANSIENT


def describe(error: Exception) -> str:
    return str(error) or type(error).__name__


async def list_files(http: Http, source: str, endpoint: str = S3_ENDPOINT) -> list[RemoteFile]:
    """The files at `s3://BUCKET/PREFIX`, or at an URL below which they have their names.

    Raises DownloadError if they are no whole index.
    """
    parts = urlsplit(source)
    if parts.scheme == "s3" and parts.netloc:
        found = await _list_bucket(http, endpoint, parts.netloc, parts.path.strip("/"))
    elif parts.scheme in ("http", "https") and parts.netloc and not parts.query:
        found = await _probe(http, source.rstrip("/"))
    else:
        raise DownloadError(f"{source} is no source: write s3://BUCKET/PREFIX or https://HOST/PATH")
    _check_complete(source, {one.name for one in found})
    return found


async def _list_bucket(http: Http, endpoint: str, bucket: str, prefix: str) -> list[RemoteFile]:
    base = f"{endpoint.rstrip('/')}/{quote(bucket)}"
    under = f"{prefix}/" if prefix else ""
    query = {"list-type": "2", "prefix": under}
    found: list[RemoteFile] = []
    others: set[str] = set()
    for _ in range(_MAX_PAGES):
        response = await http.send("GET", base, query)
        if region := _region(endpoint, response):
            return await _list_bucket(http, region, bucket, prefix)
        tree = _xml(response, bucket)
        for entry in tree.iter("Contents"):
            key = entry.findtext("Key", "")
            name = key.removeprefix(under)
            if not key.startswith(under) or not _NAME.fullmatch(name):
                others.add(name.partition("/")[0])
                continue
            etag = entry.findtext("ETag", "")
            plain = etag.strip('"')
            md5 = plain if _MD5.fullmatch(plain) else None
            if not (size := entry.findtext("Size", "")).isdecimal():
                raise DownloadError(f"{response.url}: {key} has no size")
            found.append(RemoteFile(name, f"{base}/{quote(key)}", int(size), etag, md5))
        token = tree.findtext("NextContinuationToken")
        if not token:
            break
        query["continuation-token"] = token
    if not found:
        there = f"; it has {', '.join(sorted(others)[:5])}" if others else ""
        raise DownloadError(f"s3://{bucket}/{prefix} holds no index{there}")
    return found


def _region(endpoint: str, response: httpx.Response) -> str | None:
    """The endpoint of the bucket's region, if S3 names another one."""
    region = str(response.headers.get("x-amz-bucket-region", ""))
    is_elsewhere = response.status_code in (301, 307, 400) and endpoint == S3_ENDPOINT
    is_name = re.fullmatch(r"[a-z0-9-]{1,40}", region)
    return f"https://s3.{region}.amazonaws.com" if is_elsewhere and is_name else None


def _xml(response: httpx.Response, bucket: str) -> ElementTree.Element:
    if response.status_code == 403:
        raise DownloadError(
            f"Bucket {bucket} is not public (status 403): it needs credentials, or its requester pays. "
            "Download it with `aws s3 cp --recursive`, then `index adopt` it."
        )
    if response.status_code != 200:
        raise DownloadError(f"{response.url}: status {response.status_code}")
    try:
        # The parser bounds the expansion of entities itself (expat 2.4.1 and later).
        tree = ElementTree.fromstring(response.content)  # noqa: S314
    except ElementTree.ParseError as error:
        raise DownloadError(f"{response.url} is no listing of a bucket: {error}") from None
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]  # without its namespace
    return tree


async def _probe(http: Http, base: str) -> list[RemoteFile]:
    found: list[RemoteFile] = []
    for shard in range(_MAX_SHARDS):
        for kind in KINDS:
            file = await _head(http, f"{base}/{kind}.{shard}", f"{kind}.{shard}")
            if file is not None:
                found.append(file)
            elif kind == KINDS[0]:
                return found
    return found


async def _head(http: Http, url: str, name: str) -> RemoteFile | None:
    response = await http.send("HEAD", url)
    if response.status_code in _GONE:
        return None
    size = response.headers.get("Content-Length", "")
    if response.status_code != 200 or not size.isdecimal():
        raise DownloadError(f"{url}: status {response.status_code}, or no Content-Length")
    etag = response.headers.get("ETag", "")
    plain = etag.strip('"')
    is_s3 = response.headers.get("Server") == "AmazonS3"
    return RemoteFile(
        name, url, int(size), etag, plain if is_s3 and _MD5.fullmatch(plain) else None
    )


def _check_complete(source: str, names: set[str]) -> None:
    shards = {int(name.rpartition(".")[2]) for name in names}
    kinds = {name.rpartition(".")[0] for name in names} | set(NEEDED)
    expected = {f"{kind}.{shard}" for kind in kinds for shard in range(max(shards, default=0) + 1)}
    if missing := sorted(expected - names):
        raise DownloadError(f"{source} is no whole index: {missing[0]} is missing")
