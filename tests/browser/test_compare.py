"""Compare: several answers to one prompt, side by side."""

from playwright.async_api import Page, expect

from tests.browser.conftest import Stack, assert_accessible


async def test_two_sets_of_parameters_side_by_side(stack: Stack, page: Page) -> None:
    await page.goto("/compare")
    await page.fill("#prompt", "{{delay_ms=10}} compare")
    await page.fill("#p-1-max_tokens", "5")
    await page.fill("#p-2-max_tokens", "30")
    await page.fill("#more-2", '{"top_k": 7}')
    await page.click("button.primary")
    await expect(page.locator(".live .badge")).to_have_text(["completed", "completed"])
    figures = page.locator(".live .figures")
    await expect(figures.nth(0)).to_contain_text("5 tokens")
    await expect(figures.nth(1)).to_contain_text("30 tokens")
    await expect(figures.nth(1)).to_contain_text("to the first token")
    ids = page.url.split("ids=")[1].replace("%2C", ",").split(",")
    second = stack.api.get(f"/results/{ids[1]}").json()
    assert second["parameters"] == {"max_tokens": 30, "top_k": 7}
    assert await page.input_value("#more-2") == '{"top_k": 7}'
    await assert_accessible(page)


async def test_an_equal_request_answers_if_it_may(stack: Stack, page: Page) -> None:
    async def send(reuse: str) -> None:
        await page.select_option("#reuse", reuse)
        await page.click("button.primary")
        await expect(page.locator(".live .badge")).to_have_text(["completed"])

    note = page.get_by_text("An equal request has made this text before")
    await page.goto("/compare")
    await page.fill("#prompt", "compare again")
    await page.fill("#p-1-temperature", "0")
    await page.select_option("#model-2", "")
    await send("true")
    await expect(note).to_have_count(0)
    source = page.url.split("ids=")[1].split("&")[0]
    assert await page.input_value("#reuse") == "true"
    await send("true")
    await expect(note.get_by_role("link")).to_have_attribute("href", f"/history/{source}")
    await assert_accessible(page)
    await send("false")
    await expect(note).to_have_count(0)


async def test_what_is_wrong_is_reported_by_place(stack: Stack, page: Page) -> None:
    await page.goto("/compare")
    await page.fill("#prompt", "compare")
    await page.fill("#p-1-temperature", "warm")
    await page.fill("#more-2", "top_k")
    await page.click("button.primary")
    alert = page.locator("[role=alert]")
    await expect(alert).to_contain_text("Answer 1 (scripted), temperature")
    await expect(alert).to_contain_text("Answer 2 (scripted), other parameters")
    assert await page.input_value("#p-1-temperature") == "warm"
    await page.select_option("#model-1", "")
    await page.select_option("#model-2", "")
    await page.click("button.primary")
    await expect(alert).to_contain_text("choose at least one")
