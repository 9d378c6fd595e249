"""Bulk: a table is uploaded, mapped, sent, stopped, and comes back with its answers."""

import csv
import io
import json

from playwright.async_api import FilePayload, Page, expect

from llm_api_client import Client
from tests.browser.conftest import Stack, assert_accessible


def table(
    content: str | bytes, name: str = "questions.csv", encoding: str = "utf-8"
) -> FilePayload:
    data = content if isinstance(content, bytes) else content.encode(encoding)
    return {"name": name, "mimeType": "text/csv", "buffer": data}


async def upload(page: Page, file: FilePayload) -> None:
    await page.goto("/bulk")
    await page.set_input_files("#file", files=[file])
    await page.click("text=Upload")


async def download(page: Page, link: str) -> bytes:
    async with page.expect_download() as started:
        await page.click(link)
    return (await (await started.value).path()).read_bytes()


async def test_a_table_comes_back_with_its_answers(stack: Stack, page: Page) -> None:
    content = (
        "id;topic;temperature;note\r\n"
        'a;"{{text==cmd() run}}";0.5;=1+1\r\n'
        "b;{{text=Hello; there}};0.5;-5\r\n"  # a separator too many
        'c;"{{chunks=3\nrefuse}}";;@x\r\n'
        'd;"{{text=Grüße an 🌍}}";;fine\r\n'
    )
    await upload(page, table(content, encoding="utf-16"))
    await expect(page.locator("h1")).to_have_text("questions.csv")
    await expect(page.locator("main")).to_contain_text(
        "4 rows, 4 columns; CSV, separated by semicolon, UTF-16"
    )
    await expect(page.locator("#id")).to_have_value("id")
    await expect(page.locator("#temperature_column")).to_have_value("temperature")
    await expect(page.get_by_role("region", name="Lines that cannot be sent")).to_contain_text(
        "This has 5 cells, and there are 4 columns."
    )
    await assert_accessible(page)

    await page.check("text=Text to continue")
    await page.select_option("#model", "scripted")
    await page.fill("#template", "Answer: {question}")
    await page.fill("#max_tokens", "20")
    await page.click("text=Send 4 rows")
    await expect(page.get_by_role("alert")).to_contain_text(
        "“{question}” names no column of the file. It has {id}, {topic}"
    )
    await expect(page.locator("#max_tokens")).to_have_value("20")
    await page.fill("#template", "Answer: {topic}")
    await page.click("text=Send 4 rows")
    await expect(page.get_by_role("alert")).to_contain_text("1 of 4 lines cannot be sent.")
    await page.check("text=Leave out lines that cannot be sent")
    await page.click("text=Send 4 rows")

    await expect(page.locator(".badge")).to_have_text("completed with failures")
    await expect(page.locator("main")).to_contain_text("3 of 3 rows done")
    await expect(page.get_by_role("region", name="Rows that failed")).to_contain_text("c")
    await assert_accessible(page)
    text = (await download(page, "#results-csv")).decode("utf-8-sig")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [row["id"] for row in rows] == ["a", "b", "c", "d"]
    assert [row["note"] for row in rows] == ["'=1+1", "0.5", "'@x", "fine"]
    assert [row["status"] for row in rows] == ["completed", "left_out", "failed", "completed"]
    assert [row["output"] for row in rows] == ["'=cmd() run", "", "", "Grüße an 🌍"]
    lines = (await download(page, "#results-jsonl")).splitlines()
    first = json.loads(lines[0])
    assert (first["input"]["note"], first["output"]) == ("=1+1", "=cmd() run")
    assert first["input"]["topic"] == "{{text==cmd() run}}"
    await page.click("text=All jobs")
    await expect(page.get_by_role("row", name="questions.csv")).to_contain_text("completed")
    await assert_accessible(page)


async def test_what_is_no_table_is_reported(stack: Stack, page: Page) -> None:
    wrong = {
        "sheet.xlsx": (b"PK\x03\x04rest", "an Excel workbook or a ZIP archive, not text."),
        "paper.pdf": (b"%PDF-1.7 rest", "a PDF document, not text."),
        "old.csv": ("id,name\n1,café\n".encode("latin-1"), "Line 2 is not UTF-8: the byte 0xe9"),
        "bare.csv": (b"id,name\n", "no row beneath it."),
        "empty.csv": (b"\n", "The file is empty."),
    }
    for name, (content, words) in wrong.items():
        await upload(page, table(content, name))
        await expect(page.get_by_role("alert").first).to_contain_text(f"{name} cannot be used.")
        await expect(page.get_by_role("alert").first).to_contain_text(words)
    await assert_accessible(page)


async def test_a_job_is_stopped_retried_and_deleted(stack: Stack, page: Page) -> None:
    content = "id,prompt\n" + "".join(
        f"r{number},{{{{delay_ms=100 chunks=2000}}}}\n" for number in range(20)
    )
    await upload(page, table(content, "slow.csv"))
    await page.check("text=Text to continue")
    await page.select_option("#model", "scripted")
    await page.fill("#max_tokens", "2000")
    await page.click("text=Send 20 rows")
    await expect(page.locator(".badge")).to_have_text("running")
    await assert_accessible(page)
    page.once("dialog", lambda dialog: dialog.accept())
    await page.click("#cancel")
    await expect(page.locator(".badge")).to_have_text("cancelled", timeout=30_000)
    codes = page.get_by_role("region", name="Failures by code")
    await expect(codes).to_contain_text("The request was stopped.")
    await assert_accessible(page)
    results = (await download(page, "#results-jsonl")).splitlines()
    found = [json.loads(line) for line in results]
    assert [one["input"]["id"] for one in found] == [f"r{number}" for number in range(20)]
    assert {one["error"]["code"] for one in found} == {"cancelled"}
    await page.click("#retry-cancelled")
    await expect(page.locator(".badge")).to_have_text("running")
    page.once("dialog", lambda dialog: dialog.accept())
    await page.click("#cancel")
    await expect(page.locator(".badge")).to_have_text("cancelled", timeout=30_000)
    page.once("dialog", lambda dialog: dialog.accept())
    await page.click("#delete")
    await expect(page.locator("h1")).to_have_text("Bulk")
    await expect(page.locator("main")).not_to_contain_text("slow.csv")


async def test_a_job_of_the_client_looks_the_same(stack: Stack, page: Page) -> None:
    with Client(str(stack.api.base_url)) as client:
        rows = [{"n": number} for number in range(5)]
        job = client.map(rows, "{{chunks=1}} {n}", model="scripted", name="from a notebook")
        assert job.run().counts.completed == 5
    await page.goto("/bulk")
    line = page.get_by_role("row", name="from a notebook")
    await expect(line).to_contain_text("completed")
    await line.get_by_role("link").click()
    await expect(page.locator("h1")).to_have_text("from a notebook")
    await expect(page.locator("main")).to_contain_text("5 of 5 rows done")
    lines = (await download(page, "#results-jsonl")).splitlines()
    assert {json.loads(line)["input"]["key"] for line in lines} == {f"row-{n}" for n in range(1, 6)}


async def test_the_list_follows_its_jobs(stack: Stack, page: Page) -> None:
    created = stack.api.post("/jobs", json={"name": "followed"}).json()
    await page.goto("/bulk")
    line = page.get_by_role("row", name="followed")
    await expect(line).to_contain_text("open")
    row = {"job_id": created["id"], "job_key": "a"}
    stack.finish("{{chunks=1}}", **row)
    stack.api.post(f"/jobs/{created['id']}/close")
    await expect(line).to_contain_text("completed", timeout=30_000)


async def test_requests_go_as_one_batch(stack: Stack, page: Page) -> None:
    body = {"model": "scripted", "prompt": "{{delay_ms=100 chunks=2000}}", "max_tokens": 2000}
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(20)
    ]
    content = "\n".join(json.dumps(line) for line in lines)
    await upload(page, table(content, "requests.jsonl"))
    await expect(page.locator(".note")).to_contain_text("the file is sent as one batch")
    await page.click("text=Send 20 rows")
    batches = page.get_by_role("region", name="Batches")
    await expect(batches).to_contain_text("in progress", timeout=30_000)
    await assert_accessible(page)
    page.once("dialog", lambda dialog: dialog.accept())
    await batches.get_by_role("button", name="Stop").click()
    await expect(batches).to_contain_text("cancelled", timeout=30_000)
    errors = await download(page, "text=Errors")
    assert len(errors.splitlines()) == 20
