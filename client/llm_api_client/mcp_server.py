"""A server of the Model Context Protocol: agents hand long generations to the service (the extra `mcp`).

`llm-api mcp` runs it on standard input and output, as clients of the protocol start it.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from llm_api_client.client import AsyncClient
from llm_api_client.errors import ConfigurationError, LLMAPIError, WaitTimeoutError
from llm_api_client.schemas import Result

_INSTRUCTIONS = (
    "Prompts become stored results, which survive restarts of everything. Send a prompt, go on with other work, "
    "and wait for its result by its id. Send related prompts first, and wait for them afterwards."
)
# Below the time that the protocol's clients wait for an answer: 60 s, or from one report of progress to the next.
_WAIT_SECONDS = 45.0
_MAX_WAIT_SECONDS = 600.0
_REPORT_SECONDS = 10.0

Report = Callable[[float, float], Awaitable[None]]
"""Gets the seconds that have passed, and those of the whole wait."""


def create_server(client: AsyncClient) -> Any:
    """An MCP server whose tools are calls of the client.

    Raises:
        ConfigurationError: the package mcp is not installed.
    """
    try:
        from mcp.server import MCPServer
        from mcp.server.mcpserver import Context
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise ConfigurationError(
            "This needs the package mcp, from version 2: pip install 'llm-api-client[mcp]'."
        ) from None
    server = MCPServer("llm-api", instructions=_INSTRUCTIONS)
    tools = Tools(client)
    wait = _with_reports(tools.wait, Context)
    for tool in (tools.send, wait, tools.search, tools.attribute, tools.models):
        server.tool(structured_output=False)(_explained(tool, ToolError))
    return server


def _explained(tool: Callable[..., Awaitable[Any]], kind: type[Exception]) -> Any:
    """The tool, whose errors reach the agent with their codes and advice."""

    @functools.wraps(tool)
    async def explained(*arguments: Any, **named: Any) -> Any:
        try:
            return await tool(*arguments, **named)
        except LLMAPIError as error:
            raise kind(str(error)) from error

    return explained


def _with_reports(wait: Callable[..., Awaitable[Any]], context_type: type) -> Any:
    """The tool, whose waits are reported to the agent's client. The server gives a context by its type."""

    async def reported(
        id: str,  # noqa: A002
        seconds: float = _WAIT_SECONDS,
        context: Any = None,
    ) -> Any:
        return await wait(id, seconds, context.report_progress)

    reported.__name__, reported.__doc__ = "wait", wait.__doc__
    reported.__annotations__["context"] = context_type
    return reported


class Tools:
    """The tools of the server; agents read their docstrings."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def send(
        self,
        prompt: str,
        model: str,
        max_tokens: int | None = None,
        temperature: float | None = None,
        system: str | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Send a prompt to a model and return the id of its result at once. `system` makes it a chat.

        The same idempotency_key and prompt again return the first result: use one where a step may be repeated.
        """
        given = {"max_tokens": max_tokens, "temperature": temperature}
        messages = [
            {"role": "system", "content": system or ""},
            {"role": "user", "content": prompt},
        ]
        result = await self._client.send(
            prompt if system is None else messages,
            model=model,
            parameters={name: value for name, value in given.items() if value is not None},
            idempotency_key=idempotency_key,
        )
        return _summary(result)

    async def wait(
        self,
        id: str,  # noqa: A002
        seconds: float = _WAIT_SECONDS,
        report: Report | None = None,
    ) -> dict[str, Any]:
        """Wait up to some seconds for the end of a result, and return its state and text.

        A result that is still pending continues: wait for it again later.
        """
        seconds = min(seconds, _MAX_WAIT_SECONDS)
        began = time.monotonic()
        while (left := seconds - (time.monotonic() - began)) > 0:
            try:
                return _summary(await self._client.wait(id, timeout=min(left, _REPORT_SECONDS)))
            except WaitTimeoutError:
                if report is not None:
                    await report(min(seconds, time.monotonic() - began), seconds)
        return _summary(await self._client.get(id, partial=True))

    async def search(self, words: str, limit: int = 10) -> list[dict[str, Any]]:
        """Find past results by words of their prompts and texts, newest first."""
        found = self._client.search(words, limit=max(1, min(limit, 100)))
        return [{**_summary(result), "prompt": result.prompt_start} async for result in found]

    async def attribute(self, text: str, index: str) -> dict[str, Any]:
        """Find the parts of a text that a corpus contains, with their counts."""
        found = await self._client.attributions.of_text(text, index=index)
        spans = [
            {"text": span.text, "tokens": span.length, "count": span.count} for span in found.spans
        ]
        return {"index": found.index, "spans": spans}

    async def models(self) -> dict[str, Any]:
        """List the models that can be used, and the corpora for `attribute`."""
        models = await self._client.models.list()
        members = ("name", "ready", "chat", "max_model_len", "queued")
        return {
            "models": [{member: getattr(model, member) for member in members} for model in models],
            "indexes": await self._client.attributions.indexes(),
        }


def _summary(result: Result) -> dict[str, Any]:
    """The members of a result that an agent needs."""
    members: dict[str, Any] = {"id": result.id, "state": result.state, "model": result.model_name}
    if result.text:
        members["text"] = result.text
    if result.error is not None:
        members["error"] = str(result.error)
    if result.finish_reason is not None:
        members["finish_reason"] = result.finish_reason
    return members


def serve(url: str | None, patience: float, *, allow_http: bool = False) -> None:
    """Serve on standard input and output until it is closed."""

    async def run() -> None:
        async with AsyncClient(url, patience=patience, allow_http=allow_http) as client:
            await create_server(client).run_stdio_async()

    asyncio.run(run())
