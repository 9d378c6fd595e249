"""Bulk jobs of the web page without a browser: parts, limits, and forms that are sent twice."""

import contextlib
import csv
import io
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx

from app.core.settings import Settings
from app.ui.main import create_ui
from app.ui.settings import UiSettings
from tests.integration.support import serve, until

KEY = "0199a0f27c5d7b3aa1c5e0f1d2c3b4a5"
MAPPING = {"key": KEY, "endpoint": "/v1/completions", "prompt": "prompt", "model": "scripted", "max_tokens": "3"}  # fmt: skip


class Visitor:
    """A browser without scripts."""

    def __init__(self, http: httpx.AsyncClient, api: httpx.AsyncClient) -> None:
        self.http = http
        self.api = api

    async def upload(self, content: bytes, name: str = "file.csv") -> httpx.Response:
        return await self.http.post(
            "/bulk/files", data={"purpose": "batch"}, files={"file": (name, content)}
        )

    async def send(self, content: bytes, name: str = "file.csv", **form: str) -> httpx.Response:
        uploaded = await self.upload(content, name)
        assert uploaded.status_code == 303, uploaded.text
        return await self.http.post(uploaded.headers["location"], data=MAPPING | form)

    async def ended(self, path: str) -> str:
        """The job's page once it has ended."""

        async def look() -> str | None:
            response = await self.http.get(f"{path}/progress")
            assert response.status_code == 200, response.text
            return response.text if "x-part-ended" in response.headers else None

        await until(look, 60)
        return (await self.http.get(path)).text

    async def batches(self) -> list[dict[str, Any]]:
        batches: list[dict[str, Any]] = (await self.api.get("/v1/batches")).json()["data"]
        return batches[::-1]


@contextlib.asynccontextmanager
async def visit(settings: Settings, **ui_settings: object) -> AsyncIterator[Visitor]:
    """A service, its web page, and a visitor."""
    async with serve(settings, with_worker=True) as service:
        url = str(service.client.base_url)
        app = create_ui(UiSettings.model_validate({"api_url": url} | ui_settings))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http,
        ):
            yield Visitor(http, service.client)


async def test_a_file_of_several_batches_is_one_job(settings: Settings) -> None:
    rows = [f"r{number},{'' if number == 4 else f'prompt {number}'}" for number in range(8)]
    content = "\n".join(["id,prompt", *rows]).encode()
    async with visit(settings, batch_lines=3) as visitor:
        sent = await visitor.send(content, id="id")
        assert sent.status_code == 422
        assert "1 of 8 lines cannot be sent" in sent.text
        assert await visitor.batches() == []
        sent = await visitor.send(content, id="id", skip="yes")
        assert sent.status_code == 303, sent.text
        batches = await visitor.batches()
        assert [one["metadata"]["bulk_part"] for one in batches] == ["1/3", "2/3", "3/3"]
        path = sent.headers["location"]
        assert path == f"/bulk/jobs/{batches[-1]['id']}"
        text = await visitor.ended(path)
        assert "7 of 7 lines done" in text
        assert "in 3 batches" in text
        lines = (await visitor.http.get(f"{path}/results.jsonl")).text.splitlines()
        results = [json.loads(line) for line in lines]
        assert [one["input"]["id"] for one in results] == [f"r{number}" for number in range(8)]
        statuses = ["completed"] * 8
        statuses[4] = "left_out"
        assert [one["status"] for one in results] == statuses
        assert results[4]["error"]["message"] == "The prompt is empty."
        assert {one["completion_tokens"] for one in results if one["output"]} == {3}
        listed = (await visitor.http.get("/bulk")).text
        assert listed.count('<th scope="row">') == 1

        # The same form again, as a double click sends it.
        again = await visitor.send(content, id="id", skip="yes")
        assert again.headers["location"] == "/bulk?sent=1"
        assert "This form was sent before" in (await visitor.http.get("/bulk?sent=1")).text
        assert len(await visitor.batches()) == 3

        # If the kept rows are gone, the answers still come.
        for batch in batches:
            await visitor.api.delete(f"/v1/files/{batch['metadata']['bulk_rows']}")
        table = (await visitor.http.get(f"{path}/results.csv")).content.decode("utf-8-sig")
        ids = [row["custom_id"] for row in csv.DictReader(io.StringIO(table, newline=""))]
        assert ids == [f"r{number}" for number in range(8) if number != 4]


async def test_all_batches_or_none(settings: Settings) -> None:
    limited = settings.model_copy(update={"team_max_batches": 2})
    content = b"prompt\n" + b"{{delay_ms=500 chunks=500}}\n" * 5
    async with visit(limited, batch_lines=2) as visitor:
        sent = await visitor.send(content)
        assert sent.status_code == 429
        assert "Nothing was sent. The file makes 3 batches: 2 batches of your team" in sent.text
        assert 'value="3"' in sent.text  # what was entered is still there
        states = {one["status"] for one in await visitor.batches()}
        assert states <= {"cancelling", "cancelled"}
        files = (await visitor.api.get("/v1/files?purpose=batch")).json()["data"]
        assert [one["filename"] for one in files] == ["file.csv"]


async def test_a_batch_that_the_api_refuses_is_told(settings: Settings) -> None:
    smaller = settings.model_copy(update={"max_batch_lines": 2})
    async with visit(smaller) as visitor:
        sent = await visitor.send(b"prompt\na\nb\nc\n")
        text = await visitor.ended(sent.headers["location"])
        assert "Parts of the file were refused whole." in text
        assert "A batch may have at most 2 requests" in text
        results = await visitor.http.get(f"{sent.headers['location']}/results.csv")
        assert results.text.count("failed,batch_failed: A batch may have at most 2 requests") == 3


async def test_uploads_that_are_too_large(settings: Settings) -> None:
    smaller = settings.model_copy(update={"max_file_bytes": 100_000})
    async with visit(smaller, max_upload_bytes=300_000) as visitor:
        refused = await visitor.upload(b"prompt\n" + b"x" * 400_000)
        assert refused.status_code == 413
        assert "larger than the 300,000 bytes" in refused.text
        refused = await visitor.upload(b"prompt\n" + b"x" * 200_000)
        assert refused.status_code == 413, refused.text
        assert 'role="alert"' in refused.text


async def test_a_batch_of_the_api_is_a_job_too(settings: Settings) -> None:
    line: dict[str, object] = {"custom_id": "=a", "method": "POST", "url": "/v1/completions"}
    line |= {"body": {"model": "scripted", "prompt": "{{text==1 +2}}"}}
    async with visit(settings) as visitor:
        files = {"file": ("in.jsonl", json.dumps(line).encode())}
        uploaded = await visitor.api.post("/v1/files", data={"purpose": "batch"}, files=files)
        file_id = uploaded.json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch_id = (await visitor.api.post("/v1/batches", json=body)).json()["id"]
        path = f"/bulk/jobs/{batch_id}"
        assert "1 of 1 line done" in await visitor.ended(path)
        table = (await visitor.http.get(f"{path}/results.csv")).text
        assert re.search(r"\r\n1,'=a,'=1 \+2,completed,,scripted,", table), table


async def test_what_is_not_there(settings: Settings) -> None:
    async with visit(settings) as visitor:
        for path in ("/bulk/jobs/batch_x", "/bulk/files/file-x", "/bulk/jobs/x/results.xml"):
            assert (await visitor.http.get(path)).status_code == 404, path


async def test_a_file_of_the_api_that_is_too_large(settings: Settings) -> None:
    async with visit(settings, max_upload_bytes=1_000) as visitor:
        files = {"file": ("large.csv", b"prompt\n" + b"x\n" * 1_000)}
        made = await visitor.api.post("/v1/files", data={"purpose": "batch"}, files=files)
        shown = await visitor.http.get(f"/bulk/files/{made.json()['id']}")
        assert shown.status_code == 422
        assert "It is larger than 1,000 bytes." in shown.text


async def test_rows_that_are_nested_too_deep(settings: Settings) -> None:
    content = '{"prompt": "x"}\n{"prompt": ' + "[" * 500 + "]" * 500 + "}\n"
    async with visit(settings) as visitor:
        uploaded = await visitor.upload(content.encode(), "file.jsonl")
        shown = await visitor.http.get(uploaded.headers["location"])
        assert shown.status_code == 200
        assert "(The row is nested too deep.)" in shown.text
        sent = await visitor.http.post(
            uploaded.headers["location"], data=MAPPING | {"template": "It is {prompt}."}
        )
        assert sent.status_code == 422
        assert "1 of 2 lines cannot be sent." in sent.text


async def test_metadata_that_names_what_is_not_there(settings: Settings) -> None:
    async with visit(settings) as visitor:
        sent = await visitor.send(b"prompt\none\n")
        (batch,) = await visitor.batches()
        await visitor.ended(sent.headers["location"])
        unknown = " ".join(f"{number:032x}" for number in range(1, 16))
        made = await visitor.api.post(
            "/v1/batches",
            json={
                "input_file_id": batch["input_file_id"],
                "endpoint": batch["endpoint"],
                "completion_window": "24h",
                "metadata": {f"bulk_parts_{place}": unknown for place in (1, 2)},
            },
        )
        assert made.status_code == 200, made.text
        path = f"/bulk/jobs/{made.json()['id']}"
        assert "not there any more" in await visitor.ended(path)
        assert "sending broke off" in (await visitor.http.get("/bulk")).text
        assert (await visitor.http.get(f"{path}/results.jsonl")).status_code == 200
