"""Signing in, its end in the middle of something, and what a page keeps to itself."""

import re

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser.conftest import Secured, assert_accessible


async def sign_in(page: Page, secured: Secured, token: str, path: str = "/") -> None:
    await page.goto(secured.url + path)
    await page.fill("#token", token)
    await page.click("button.primary")


async def test_a_token_opens_the_page(secured: Secured, page: Page) -> None:
    await page.goto(f"{secured.url}/compare")
    await expect(page.locator("h1")).to_have_text("Sign in")
    await assert_accessible(page)
    await page.fill("#token", "llm_wrong_token")
    await page.click("button.primary")
    await expect(page.locator("[role=alert]")).to_contain_text("does not take this token")
    token = secured.token("red")
    await page.fill("#token", token)
    await page.click("button.primary")
    await expect(page.locator("h1")).to_have_text("Compare")  # where it was to go
    await expect(page.locator(".team")).to_have_text("Team red")
    # Nothing of it for scripts, in the page or in what the browser keeps for them.
    kept = await page.evaluate("JSON.stringify([document.cookie, localStorage, sessionStorage])")
    assert token not in kept + await page.content()
    assert kept == '["",{},{}]'
    (cookie,) = await page.context.cookies(secured.url)
    assert cookie.get("httpOnly")
    assert cookie.get("sameSite") == "Lax"
    assert token not in cookie.get("value", "")
    # An ordinary token is shown no operators' pages.
    assert await page.locator("nav a:has-text('System')").count() == 0
    await page.click("text=Sign out")
    await page.goto(f"{secured.url}/playground")
    await expect(page.locator("h1")).to_have_text("Sign in")


async def test_an_operator_is_shown_more(secured: Secured, page: Page) -> None:
    await sign_in(page, secured, secured.token("blue", "--scopes", "use,operate"))
    await expect(page.locator("nav a:has-text('System')")).to_have_count(1)


async def test_what_was_entered_outlives_the_sign_in(secured: Secured, page: Page) -> None:
    first = secured.token("green")
    await sign_in(page, secured, first, "/playground")
    await page.fill("#prompt", "{{chunks=3}} two\nlines & <more>")
    await page.fill("#p-max_tokens", "7")
    secured.revoke(first)
    await page.click("button.primary")
    await expect(page.locator("[role=alert]")).to_contain_text("Your sign-in has ended.")
    second = secured.token("green")
    await page.fill("#token", second)
    await page.click("button.primary")
    await page.click("text=Send it now")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    result = secured.read(f"/results/{page.url.rsplit('/', 1)[1]}", second)
    assert result["parameters"]["max_tokens"] == 7
    context = secured.read(f"/contexts/{result['context_id']}", second)
    prompt = context["content"] or context["messages"][-1]["content"]
    assert prompt == "{{chunks=3}} two\nlines & <more>"


@pytest.mark.parametrize(
    ("path", "before", "next_path"),
    [
        ("/bulk/files", "/bulk?after=x", "/bulk?after=x"),
        ("/bulk/jobs/01890000-0000-7000-8000-000000000000/cancel", "", "/"),
    ],
)
def test_what_cannot_be_sent_again_leads_back(
    secured: Secured, path: str, before: str, next_path: str
) -> None:
    referer = {"Referer": secured.url + before if before else "https://evil.example/x"}
    files = {"file": ("a.csv", b"prompt\n" + 1000 * b"x\n")} if "files" in path else None
    answer = httpx.post(secured.url + path, files=files, headers=referer)
    assert answer.status_code == 401
    assert f'name="next" value="{next_path}"' in answer.text


async def test_a_team_sees_its_own_alone(secured: Secured, page: Page, browser: Browser) -> None:
    await sign_in(page, secured, secured.token("yellow"), "/playground")
    await page.fill("#prompt", "{{chunks=3}} secret")
    await page.click("button.primary")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    address = page.url
    context = await browser.new_context()
    other = await context.new_page()
    await sign_in(other, secured, secured.token("orange"), address.removeprefix(secured.url))
    await expect(other.locator("h1")).to_have_text("Not found")
    assert "secret" not in await other.content()
    for part in ("events", "answer"):
        path = address.replace("/playground/", "/results/") + f"/{part}"
        response = await context.request.get(path, headers={"X-Part": "1"})
        assert response.status == 404
    await context.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 401),  # it would have to sign in
    ],
)
def test_forms_of_other_sites_are_refused(
    secured: Secured, headers: dict[str, str], status: int
) -> None:
    answer = httpx.post(f"{secured.url}/playground", data={"prompt": "x"}, headers=headers)
    assert answer.status_code == status


def test_every_answer_has_the_headers(secured: Secured) -> None:
    for path in ("/", "/sign-in", "/playground", "/nowhere", "/static/page.css", "/ready"):
        headers = httpx.get(secured.url + path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["//evil.example", "/\\evil.example", "https://evil.example", "x"])
def test_a_sign_in_leads_nowhere_else(secured: Secured, path: str) -> None:
    form = {"token": secured.token("red"), "next": path}
    answer = httpx.post(f"{secured.url}/sign-in", data=form)
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"


def test_what_is_long_does_not_wait_for_a_sign_in(secured: Secured) -> None:
    for count, is_kept in ((800_000, True), (950_000, False)):
        answer = httpx.post(f"{secured.url}/playground", data={"prompt": "x" * count})
        assert answer.status_code == 401
        assert ('name="resume.prompt"' in answer.text) is is_kept
        assert (len(answer.text) > count) is is_kept


def test_too_much_is_refused(secured: Secured) -> None:
    answer = httpx.post(f"{secured.url}/sign-in", data={"token": "x" * 1_100_000})
    assert answer.status_code == 413
    assert re.search("more than 1,000,000 bytes", answer.text)
