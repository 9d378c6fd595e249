"""Clients of a service that runs in this process."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from llm_api_client import Client
from tests.conftest import Service

T = TypeVar("T")


def url_of(service: Service) -> str:
    return str(service.client.base_url).rstrip("/")


async def blocking(service: Service, work: Callable[[Client], T], key: str | None = None) -> T:
    """Run work with a blocking client in a thread: the service needs this event loop."""

    def run() -> T:
        with Client(url_of(service), key) as client:
            return work(client)

    return await asyncio.to_thread(run)
