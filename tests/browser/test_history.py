"""The history: find a result, read it, act on it, and see where its words come from."""

import json

from playwright.async_api import Page, expect

from tests.browser.conftest import Stack, assert_accessible

CODE = "def read(self, size=-1):\n    return self._file.read(size)\n"
HOSTILE = "<script>document.title='taken'</script>"


async def test_results_are_found_by_words_and_filters(stack: Stack, page: Page) -> None:
    wanted = stack.finish("an okapi {{chunks=2}}", metadata={"a": HOSTILE})
    stack.finish("an okapi {{refuse}}")
    await page.goto("/history?q=okapi")
    rows = page.locator("tbody tr")
    # The words are known about a second after the end.
    while await rows.count() < 2:
        await page.wait_for_timeout(200)
        await page.reload()
    await expect(rows).to_have_count(2)
    await page.click("summary:has-text('Filters')")
    await page.select_option("#state", "completed")
    await page.fill("#created_after", "2020-01-01T00:00")
    await page.click("text=Apply")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("an okapi {{chunks=2}}")
    assert await page.input_value("#q") == "okapi"
    assert await page.input_value("#created_after") == "2020-01-01T00:00"
    await assert_accessible(page)
    async with page.expect_download() as download:
        await page.click("text=Export all of these")
    lines = (await (await download.value).path()).read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [wanted]
    await page.locator(".chips a", has_text="State").click()
    await expect(rows).to_have_count(2)
    await rows.first.get_by_role("link").press("Enter")
    await expect(page.locator(".live .badge")).to_have_text("failed")
    await expect(page.locator(".live .problem")).to_contain_text("The model refused the request.")


async def test_an_empty_search_and_a_wrong_filter_show_the_remedy(stack: Stack, page: Page) -> None:
    await page.goto("/history?q=nowhereinhere")
    await expect(page.locator(".empty")).to_contain_text("Nothing matches the search.")
    await assert_accessible(page)
    for wrong, message in (
        ("q=%21%21", "has no word to search by"),
        ("created_after=soon", "must be a day and a time"),
        ("state=lost", "state"),
        ("metadata=run", "must have the form KEY=VALUE"),
        ("after=%3Cscript%3E", "after"),
        ("context_id=x&model_name=y", "context_id"),
    ):
        answer = await page.goto(f"/history?{wrong}")
        assert answer is not None
        assert answer.status == 422
        await expect(page.locator("[role=alert]")).to_contain_text(message)


async def test_pages_go_older_and_newer(stack: Stack, page: Page) -> None:
    body = [
        {"model": "scripted", "content": f"page {number} {{{{chunks=1}}}}"} for number in range(60)
    ]
    sent = [item["id"] for item in stack.api.post("/results/", json=body).json()]
    await page.goto(
        f"/history?created_after={stack.api.get(f'/results/{sent[0]}').json()['created_at'].replace('+', '%2B')}"
    )
    links = page.locator("tbody a")
    shown = [await link.get_attribute("href") for link in await links.all()]
    await page.click("a[rel=next]")
    shown += [await link.get_attribute("href") for link in await links.all()]
    assert [f"/history/{one}" for one in sorted(sent, reverse=True)] == shown[:60]
    await page.click("a[rel=prev]")
    await expect(links.first).to_have_attribute("href", shown[0] or "")


async def test_a_pending_result_streams_and_its_details_follow(stack: Stack, page: Page) -> None:
    result_id = stack.send("{{delay_ms=50 chunks=40}}", parameters={"max_tokens": 60, "seed": 7})
    await page.goto(f"/history/{result_id}")
    await expect(page.locator(".live .output")).to_contain_text(" ")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    await expect(page.locator(".chart-legend")).to_contain_text("Decode")
    await expect(page.locator("table.attempts")).to_contain_text("Completed")
    await expect(page.locator("tr", has_text="seed")).to_contain_text("7")
    await page.reload()
    await assert_accessible(page)


async def test_what_may_be_done_with_a_result(stack: Stack, page: Page) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HOSTILE}]
    body = {"model": "scripted", "messages": chat, "metadata": {HOSTILE: HOSTILE}}
    result_id = stack.api.post("/results/", json=body, headers={"Prefer": "wait=30"}).json()["id"]
    await page.goto(f"/history/{result_id}")
    await expect(page.locator(".turn.user")).to_contain_text(HOSTILE)
    assert (await page.title()).startswith("Result ")
    await page.click("text=Open in playground")
    assert await page.input_value("#prompt") == HOSTILE
    assert await page.input_value("#system") == "Be brief."
    await page.goto(f"/history/{result_id}")
    await page.click("text=Retry")
    await page.wait_for_url(lambda url: result_id not in url)
    await page.click("text=an earlier result")
    await page.wait_for_url(f"**/history/{result_id}")
    page.on("dialog", lambda dialog: dialog.accept())
    await page.click("text=Delete")
    await expect(page.locator("[role=status].note")).to_have_text("The result is deleted.")
    assert stack.api.get(f"/results/{result_id}").status_code == 404


async def test_all_that_is_pending_of_a_prompt_is_stopped(stack: Stack, page: Page) -> None:
    result_id = stack.send("{{delay_ms=50 chunks=2000}}", parameters={"max_tokens": 2000})
    context_id = stack.api.get(f"/results/{result_id}").json()["context_id"]
    await page.goto(f"/history?context_id={context_id}")
    page.on("dialog", lambda dialog: dialog.accept())
    await page.click("text=Stop all pending of this prompt")
    await expect(page.locator("[role=status].note")).to_have_text("One result is stopped.")
    stack.api.get(f"/results/{result_id}", params={"wait": 30})
    await page.reload()
    await expect(page.locator("tbody .badge")).to_have_text("cancelled")


async def test_long_texts_are_shown_in_part_and_given_whole(stack: Stack, page: Page) -> None:
    prompt = "{{chunks=1}} " + "long & <wide> " * 100_000
    result_id = stack.finish(prompt)
    answer = await page.goto(f"/history/{result_id}")
    assert answer is not None
    assert len(await answer.body()) < 1_000_000
    async with page.expect_download() as download:
        await page.click("text=Download the whole prompt")
    assert (await (await download.value).path()).read_text() == prompt


async def test_addresses_that_name_nothing_are_reported(stack: Stack, page: Page) -> None:
    for path in (
        "%3Cscript%3E",
        "..%2f..%2fmodels",
        "00000000-0000-0000-0000-000000000000",
        "x/part",
    ):
        answer = await page.goto(f"/history/{path}")
        assert answer is not None
        assert answer.status == 404
        await expect(page.locator("h1")).to_have_text("Not found")


async def test_words_are_traced_to_documents(stack: Stack, page: Page) -> None:
    result_id = stack.finish("{{text=" + CODE + "}}", parameters={"max_tokens": 100})
    await page.goto(f"/history/{result_id}")
    await page.click("summary:has-text('Criteria of a match')")
    await page.fill("#maximumFrequency", "many")
    await page.click("text=Attribute the answer")
    await expect(page.locator("[role=alert]")).to_contain_text("must be a whole number")
    assert await page.input_value("#maximumFrequency") == "many"
    await page.fill("#maximumFrequency", "1000")
    await page.fill("#maximumSpanDensity", "1")
    await page.click("text=Attribute the answer")
    marks = page.locator(".attributed a")
    await expect(marks.first).to_be_visible()
    text = stack.api.get(f"/results/{result_id}").json()["result"]
    assert await page.locator(".attributed").text_content() == text
    await marks.last.press("Enter")
    await expect(page.locator(".attributed a[aria-current]").last).to_be_visible()
    needle = (await page.locator("q.needle").text_content() or "").strip()
    assert needle
    assert needle in text
    await expect(page.locator(".document mark").first).to_have_text(needle)
    await assert_accessible(page)
    await page.click("text=a result")
    await expect(page.locator("#attribution li")).to_contain_text("Attribution by demo")
