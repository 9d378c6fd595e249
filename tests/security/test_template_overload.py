"""Messages that keep the threads of chat templates busy: others are asked to try again, not refused."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.api.errors.error_responses import refusal
from app.batches.dispatcher import _is_transient
from app.core.errors import InvalidRequestError, ServiceError
from app.inference import prompts
from app.inference.prompts import PromptFormat, read_format
from tests.integration.support import write_model

MESSAGES = [{"role": "user", "content": "hi"}]


def make_format(directory: Path, template: str = "{{ messages[0].content }}") -> PromptFormat:
    write_model(directory, "m", template=template)
    found = read_format(directory, "m")
    assert found is not None
    return found


@pytest.fixture
def occupied() -> Iterator[threading.Event]:
    """All threads of templates, occupied until the event is set."""
    release, busy = threading.Event(), threading.Semaphore(0)

    def occupy() -> None:
        busy.release()
        release.wait()

    for _ in range(2):
        prompts._RENDERING._pool.submit(occupy)
    for _ in range(2):
        busy.acquire()
    yield release
    release.set()


async def test_without_a_free_thread_a_request_may_be_repeated(
    tmp_path: Path, occupied: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_QUEUE_SECONDS", 0.01, raising=False)
    monkeypatch.setattr(prompts, "_RENDER_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(ServiceError) as caught:
        await make_format(tmp_path).render(MESSAGES)
    assert caught.value.status == 503
    assert _is_transient(caught.value, None)  # a batch tries its line again
    for path in ("/results/", "/v1/chat/completions"):
        response = refusal(path, caught.value)
        assert response.status_code == 503
        assert response.headers["Retry-After"]


async def test_the_time_in_the_queue_is_not_the_templates(
    tmp_path: Path, occupied: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_RENDER_TIMEOUT_SECONDS", 0.1)
    rendering = asyncio.create_task(make_format(tmp_path).render(MESSAGES))
    done, _ = await asyncio.wait({rendering}, timeout=0.2)
    assert not done  # longer than the template's own time
    occupied.set()
    assert await rendering == "hi"


async def test_an_abandoned_request_leaves_the_queue(occupied: threading.Event) -> None:
    run: list[str] = []

    def start(name: str) -> "asyncio.Task[None]":
        work = prompts._RENDERING.run(lambda: run.append(name), seconds=5, queue_seconds=60)
        return asyncio.create_task(work)

    abandoned, kept = start("abandoned"), start("kept")
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.wait({abandoned})
    occupied.set()
    await kept
    assert run == ["kept"]


async def test_a_template_that_writes_without_end_frees_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.inference.chat_templates.MAX_SECONDS", 0.05)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    found = make_format(tmp_path, loops)
    with pytest.raises(InvalidRequestError, match="longer than"):
        await found.render(MESSAGES)
    # All threads are free again.
    harmless = make_format(tmp_path / "other")
    assert await asyncio.gather(*(harmless.render(MESSAGES) for _ in range(3))) == ["hi"] * 3
