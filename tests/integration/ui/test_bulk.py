"""Bulk jobs of the web page without a browser: sending, interruptions, stopping, retrying, and lists of jobs."""

import asyncio
import contextlib
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from app.core.settings import Settings
from app.ui.api import Api
from app.ui.bulk import reading, sending
from app.ui.bulk.background import Report
from app.ui.errors import RefusedError
from tests.integration.support import until
from tests.integration.ui.visitor import KEY, visit


async def test_a_file_is_a_job(settings: Settings) -> None:
    rows = [f"r{number},{'' if number == 4 else f'prompt {number}'}" for number in range(8)]
    content = "\n".join(["id,prompt", *rows]).encode()
    async with visit(settings) as visitor:
        sent = await visitor.send(content, id="id")
        assert sent.status_code == 422
        assert "1 of 8 lines cannot be sent" in sent.text
        assert await visitor.jobs() == []
        sent = await visitor.send(content, id="id", skip="yes")
        assert sent.status_code == 303, sent.text
        (job,) = await visitor.jobs()
        assert (job["name"], job["total"], job["key"]) == ("file.csv", 7, f"bulk-{KEY}")
        path = sent.headers["location"]
        assert path == f"/bulk/jobs/{job['id']}"
        text = await visitor.ended(path)
        assert "7 of 7 rows done" in text
        results = await visitor.results(path)
        assert [one["input"]["id"] for one in results] == [f"r{number}" for number in range(8)]
        statuses = ["completed"] * 8
        statuses[4] = "left_out"
        assert [one["status"] for one in results] == statuses
        assert results[4]["error"]["message"] == "The prompt is empty."
        assert {one["completion_tokens"] for one in results if one["output"]} == {3}

        # The same form again, as a double click sends it: the same job, and no file more.
        files = await visitor.files()
        again = await visitor.send(content, id="id", skip="yes")
        assert again.headers["location"] == path
        assert [one["id"] for one in await visitor.jobs()] == [job["id"]]
        assert len(await visitor.files()) == len(files) + 1  # the uploaded one

        # If the kept rows are gone, the answers still come, in the order of their ends.
        await visitor.api.delete(f"/v1/files/{job['metadata']['bulk_rows']}")
        table = (await visitor.http.get(f"{path}/results.csv")).content.decode("utf-8-sig")
        keys = [row["key"] for row in csv.DictReader(io.StringIO(table, newline=""))]
        assert sorted(keys) == [f"r{number}" for number in range(8) if number != 4]


async def test_many_rows_in_several_lists(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ui.bulk.sending.MAX_ROWS", 3)
    monkeypatch.setattr("app.ui.bulk.reading._ROWS_AT_ONCE", 4)
    smaller = settings.model_copy(update={"max_body_bytes": 1_000})
    long = "x" * 400  # three of them are one body too large, and are halved
    content = "prompt\n" + "".join(f"{number} {long}\n" for number in range(10)) + "y" * 1200
    async with visit(smaller) as visitor:
        sent = await visitor.send(content.encode())
        path = sent.headers["location"]
        assert "10 of 10 rows done" in await visitor.ended(path)
        results = await visitor.results(path)
        assert [one["status"] for one in results] == ["completed"] * 10 + ["failed"]
        assert results[-1]["error"]["code"] == "body_too_large"
        assert "Not taken" in (await visitor.http.get(path)).text


async def test_rows_that_the_api_refuses_have_their_reasons(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def post(api: Api, items: Sequence[bytes]) -> list[dict[str, Any]]:
        asked.append(len(items))
        return await sending.post_rows(api, items)

    monkeypatch.setattr(reading, "post_rows", post)
    async with visit(settings) as visitor:
        content = b"prompt,model\na,scripted\nb,absent\nc,\n" + b"d,absent\n" * 20
        sent = await visitor.send(content, model_column="model")
        path = sent.headers["location"]
        text = await visitor.ended(path)
        assert "completed with failures" in text
        assert re.search(r"Not taken</dt><dd>21<", text)
        results = await visitor.results(path)
        refused = ["failed"] * 20
        assert [one["status"] for one in results] == ["completed", "failed", "completed", *refused]
        errors = [one["error"] and one["error"]["code"] for one in results]
        assert errors == [None, "unknown_model", None, *["unknown_model"] * 20]
        assert "absent" in results[1]["error"]["message"]
        assert asked == [21]  # one request for the rows of a page
        (job,) = await visitor.jobs()
        assert job["counts"]["rows"] == 2  # the download has stored nothing


async def test_reasons_come_in_bounded_lists(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each list within the bytes of a request; a stopped job's rows were not sent, also beyond the limits."""
    smaller = settings.model_copy(update={"max_body_bytes": 1_000, "team_max_queued": 2})
    content = b"prompt\n" + b"x" * 400 + b"\n" + b"y" * 1_200 + b"\n" + b"z\n" * 9
    async with visit(smaller) as visitor:
        await visitor.background.close()
        monkeypatch.setattr(sending.Sending, "run", _send_nothing)
        path = (await visitor.send(content)).headers["location"]
        await visitor.until_idle(path)
        (job,) = await visitor.jobs()
        await visitor.api.post(f"/jobs/{job['id']}/cancel")
        await visitor.ended(path)
        results = await visitor.results(path)
        codes = [one["error"]["code"] for one in results]
        assert codes == ["not_sent", "body_too_large", *["not_sent"] * 9]


async def _send_nothing(self: sending.Sending, report: Report) -> None:
    """An interruption before the first list."""


async def test_an_interrupted_sending_goes_on(settings: Settings) -> None:
    """The process of the page dies with some lists sent; another one sends the rest."""
    content = b"prompt\n" + b"".join(b"p%d\n" % number for number in range(40))
    async with visit(settings) as visitor:
        await visitor.background.close()  # as a process that dies takes its work along
        with _stopped_sending():
            sent = await visitor.send(content)
            path = sent.headers["location"]
            text = await visitor.until_idle(path)
        assert "Send the rest" in text
        (job,) = await visitor.jobs()
        assert (job["state"], job["counts"]["rows"]) == ("open", 5)
        pending = await visitor.results(path)
        assert {one["status"] for one in pending[5:]} == {"pending"}
        assert len(pending) == 40
        resumed = await visitor.http.post(f"{path}/continue")
        assert resumed.headers["location"] == path
        assert "40 of 40 rows done" in await visitor.ended(path)
        results = await visitor.results(path)
        assert [one["status"] for one in results] == ["completed"] * 40
        assert len({one["result_id"] for one in results}) == 40
        stored = (await visitor.api.get("/results/", params={"limit": 1000})).json()
        assert len(stored) == 40


@contextlib.contextmanager
def _stopped_sending() -> Iterator[None]:
    """Lists of five rows, and a failure behind the first one."""
    original = sending.Sending._post

    async def post(self: sending.Sending, items: Sequence[bytes]) -> None:
        if self._sent:
            raise RefusedError(500, "internal_error", "It broke.")
        await original(self, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "MAX_ROWS", 5)
        patch.setattr(sending.Sending, "_post", post)
        yield


@pytest.mark.trial
async def test_a_full_queue_is_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ui.bulk.sending.MAX_ROWS", 10)
    monkeypatch.setattr("app.ui.bulk.sending._PAUSE_SECONDS", 0.1)
    monkeypatch.setattr("app.ui.bulk.sending._MAX_PAUSE_SECONDS", 0.1)
    limited = settings.model_copy(update={"team_max_queued": 12, "team_max_running": 4})
    content = b"prompt\n" + b"{{delay_ms=30 chunks=3}}\n" * 60
    async with visit(limited) as visitor:
        sent = await visitor.send(content)
        path = sent.headers["location"]
        notes = set()
        while visitor.background.is_busy(path.rpartition("/")[2]):
            notes |= set(re.findall("Waiting: [^<]*", (await visitor.http.get(path)).text))
            await asyncio.sleep(0.02)
        assert any("wait for model scripted" in one for one in notes), notes
        assert "60 of 60 rows done" in await visitor.ended(path)
        assert {one["status"] for one in await visitor.results(path)} == {"completed"}


@pytest.mark.trial
async def test_stop_and_retry(settings: Settings) -> None:
    content = b"id,prompt\n" + b"".join(
        b"r%d,{{delay_ms=100 chunks=600}}\n" % number for number in range(6)
    )
    async with visit(settings) as visitor:
        sent = await visitor.send(content, id="id", max_tokens="600")
        path = sent.headers["location"]
        early = await visitor.http.post(f"{path}/delete")
        assert early.status_code == 409
        assert "The job has not ended" in early.text
        await visitor.until_idle(path)
        assert (await visitor.http.post(f"{path}/cancel")).headers["location"] == path
        text = await visitor.ended(path)
        assert re.search(r'badge failed" role="status">cancelled<', text)
        assert "Retry the rows with cancelled" in text
        assert text.count('<th scope="row"><a href="/history/') == 6
        none = await visitor.http.post(f"{path}/retry", data={"error_code": "model_error"})
        assert none.status_code == 303
        assert (await visitor.jobs())[0]["counts"]["failed"] == 6
        again = await visitor.http.post(f"{path}/retry", data={"error_code": "cancelled"})
        assert again.headers["location"] == path
        (job,) = await visitor.jobs()
        assert (job["counts"]["pending"], job["errors"]) == (6, {})
        await visitor.http.post(f"{path}/cancel")
        await visitor.ended(path)
        file_id = job["metadata"]["bulk_rows"]
        assert (await visitor.http.post(f"{path}/delete")).headers["location"] == "/bulk"
        assert await visitor.jobs() == []
        assert (await visitor.api.get(f"/v1/files/{file_id}")).status_code == 404
        assert (await visitor.http.get(path)).status_code == 404


@pytest.mark.trial
async def test_many_failed_rows_are_retried_behind_the_response(settings: Settings) -> None:
    content = b"prompt\n" + b"{{fail_at=1}}\n" * 450
    async with visit(settings) as visitor:
        sent = await visitor.send(content)
        path = sent.headers["location"]
        assert "450 of 450 rows done" in await visitor.ended(path)
        assert (await visitor.http.post(f"{path}/retry")).status_code == 303
        (job,) = await visitor.jobs()

        async def are_all_retried() -> bool:
            listed = (await visitor.api.get(f"/jobs/{job['id']}")).json()
            return bool(listed["state"] == "ended") and not visitor.background.is_busy(job["id"])

        await until(are_all_retried, 60)
        ends = []
        after = 0
        while page := (
            await visitor.api.get(
                f"/jobs/{job['id']}/results", params={"after": after, "full": False}
            )
        ).json():
            ends += page
            after = page[-1]["place"]
        assert len(ends) == 450  # a retried row stands at its last end
        assert min(one["place"] for one in ends) > 450


async def test_a_file_of_requests_is_a_batch(settings: Settings) -> None:
    line: dict[str, object] = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line |= {"body": {"model": "scripted", "prompt": "{{text=hello}}"}}
    async with visit(settings) as visitor:
        shown = await visitor.upload(json.dumps(line).encode(), "requests.jsonl")
        text = (await visitor.http.get(shown.headers["location"])).text
        assert "the file is sent as one batch" in text
        for _ in range(2):  # a double click
            sent = await visitor.http.post(shown.headers["location"], data={"key": KEY})
            assert sent.headers["location"] == "/bulk#batches"

        async def has_ended() -> str | None:
            text = (await visitor.http.get("/bulk/lists")).text
            return text if ">Outputs</a>" in text else None

        text = await until(has_ended, 60)
        assert text.count("requests.jsonl") == 1
        link = re.search(r'href="(/bulk/batches/files/[^"]*)"', text)
        assert link
        output = await visitor.http.get(link[1])
        assert json.loads(output.text)["custom_id"] == "a"
        assert "attachment" in output.headers["content-disposition"]
        line["url"] = "/v1/other"
        wrong = await visitor.upload(json.dumps(line).encode(), "wrong.jsonl")
        refused = await visitor.http.post(wrong.headers["location"], data={"key": KEY})
        assert refused.status_code in (400, 422)
        assert 'role="alert"' in refused.text


async def test_jobs_of_programs_are_jobs_like_the_others(settings: Settings) -> None:
    async with visit(settings) as visitor:
        created = await visitor.api.post("/jobs", json={"name": "<b>Many</b>", "total": 1234})
        job_id = created.json()["id"]
        row = {"model": "scripted", "content": "{{text==1}}", "job_id": job_id, "job_key": "=a"}
        assert (await visitor.api.post("/results/", json=row)).status_code == 202
        shown = (await visitor.http.get("/bulk")).text
        assert "&lt;b&gt;Many&lt;/b&gt;" in shown
        assert ">1,234<" in shown
        path = f"/bulk/jobs/{job_id}"
        assert "A program sends its rows" in (await visitor.http.get(path)).text
        await visitor.api.post(f"/jobs/{job_id}/close")
        assert "1 of 1 row done" in await visitor.ended(path)
        table = (await visitor.http.get(f"{path}/results.csv")).text
        assert re.search(r"\r\n1,'=a,'=1,completed,,scripted,", table), table


async def test_older_jobs_are_on_further_pages(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ui.pages.bulk._PAGE_SIZE", 2)
    async with visit(settings) as visitor:
        for number in range(3):
            await visitor.api.post("/jobs", json={"name": f"job {number}"})
        first = (await visitor.http.get("/bulk")).text
        assert re.findall(r">(job \d)<", first) == ["job 2", "job 1"]
        older = re.search(r'href="(/bulk\?after=[^"]*)"', first)
        assert older
        second = (await visitor.http.get(older[1])).text
        assert re.findall(r">(job \d)<", second) == ["job 0"]
        part = re.search(r'data-refresh="([^"]*)"', second)
        assert part
        assert "job 0" in (await visitor.http.get(part[1])).text
