"""The web page with oversized input and with an unavailable API: without a browser."""

import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette

from app.core.settings import Settings
from app.ui import bounded
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.conftest import Service
from tests.integration.support import finish, serve

REFRESH = '<meta http-equiv="refresh"'


@contextlib.asynccontextmanager
async def page_of(
    url: str, **changes: object
) -> AsyncIterator[tuple[Starlette, httpx.AsyncClient]]:
    app = create_ui(UiSettings.model_validate({"api_url": url} | changes))
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
    ):
        yield app, http


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Service]:
    async with serve(settings, with_worker=True) as service:
        yield service


async def test_files_have_the_room_of_the_largest_one(api: Service) -> None:
    content = b"prompt\n" + b"say\n" * 200
    async with page_of(str(api.client.base_url), max_upload_bytes=1500) as (app, http):
        files = {"file": ("a.csv", content)}
        uploaded = await http.post("/bulk/files", data={"purpose": "batch"}, files=files)
        path = uploaded.headers["location"]
        with app.state.bulk_space.reserve(1000):
            for refused in (await http.get(path), await http.post(path, data={"prompt": "prompt"})):
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "30"
                assert "Other files are being read" in refused.text
            assert 'name="prompt" value="prompt"' in refused.text  # to be sent again
            with app.state.bulk_space.reserve(400):  # something smaller finds it
                pass
        assert (await http.get(path)).status_code == 200
        assert (await http.get(path)).status_code == 200  # what was held is given back


async def test_results_are_read_within_bounds(
    api: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = await finish(api, "long {{chunks=300}}", parameters={"max_tokens": 400})
    path, part = result["id"], {"X-Part": "1"}
    async with page_of(str(api.client.base_url)) as (_, http):
        whole = await http.get(f"/results/{path}/answer", headers=part)
        assert result["result"][-20:] in whole.text
        monkeypatch.setattr(bounded, "MAX_BYTES", 2000)
        large = await http.get(f"/results/{path}/answer", headers=part)
        assert (large.status_code, large.headers["x-state"]) == (200, "ended")
        assert "too large to be shown" in large.text
        assert f"/history/{path}/json" in large.text
        watched = await http.get(f"/playground/{path}")
        assert (watched.status_code, watched.headers["location"]) == (303, f"/history/{path}")
        for address in (f"/playground?from={path}", f"/compare?ids={path}"):
            refused = await http.get(address)
            assert (refused.status_code, path in refused.text) == (413, True)


async def test_a_place_that_is_refused_is_named_and_the_others_are_not_sent(api: Service) -> None:
    form = {
        "prompt": "{{delay_ms=100 chunks=200}}",
        "mode": "text",
        "1.model": "scripted",
        "3.model": "no-such",
        "4.model": "scripted",
        "4.more": '{"top_k": -7}',
    }
    async with page_of(str(api.client.base_url)) as (_, http):
        refused = await http.post("/compare", data=form)
        assert refused.status_code == 422
        assert "Answer 3 (no-such)" in refused.text
        assert "Answer 4 (scripted), parameters.top_k" in refused.text
        assert "Answer 1" not in refused.text.split("<form", 2)[0]
    (sent,) = (await api.client.get("/results/")).json()
    assert sent["state"] == "failed" or sent["cancel_requested_at"]


async def test_a_page_without_its_api_loads_itself_anew() -> None:
    async with page_of("http://127.0.0.1:1") as (_, http):
        for path in ("/playground", "/history", "/models"):
            away = await http.get(path)
            assert (away.status_code, REFRESH in away.text) == (502, True)
        # A form would be sent again, and a missing page does not come.
        sent = await http.post("/playground", data={"prompt": "x"})
        assert (sent.status_code, REFRESH in sent.text) == (502, False)
        assert REFRESH not in (await http.get("/no-such")).text
