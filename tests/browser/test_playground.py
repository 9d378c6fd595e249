"""The playground: send, watch, stop, come back, go on."""

import os
import re

from playwright.async_api import Page, expect

from tests.browser.conftest import Stack, assert_accessible
from tests.conftest import ROOT


async def send(page: Page, prompt: str, **parameters: str) -> None:
    await page.fill("#prompt", prompt)
    for name, value in parameters.items():
        await page.fill(f"#p-{name}", value)
    await page.click("button.primary")


async def test_an_answer_is_watched_and_kept(stack: Stack, page: Page) -> None:
    await page.goto("/")
    await send(page, "{{delay_ms=20 chunks=40}}", max_tokens="100")
    output = page.locator(".live .output")
    await expect(output).to_contain_text(" ")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    result_id = page.url.rsplit("/", 1)[1]
    result = stack.api.get(f"/results/{result_id}").json()
    assert result["usage"]["completion_tokens"] == 40
    assert result["parameters"]["max_tokens"] == 100
    await page.click("text=Show as plain text")
    await expect(output).to_have_text(result["result"], use_inner_text=False)
    await expect(page.locator(".figures")).to_contain_text("40 tokens")
    await assert_accessible(page)


async def test_the_time_to_the_first_token_needs_no_clock_of_the_browser(page: Page) -> None:
    ahead = "const now = Date.now; Date.now = () => now() + 3_600_000;"
    await page.add_init_script(
        f"{ahead} Object.defineProperty(performance, 'timeOrigin', {{value: 0}});"
    )
    await page.goto("/playground")
    # So slow that a late reader of the stream still gets its beginning.
    await send(page, "{{delay_ms=250 chunks=100}}", max_tokens="100")
    figures = page.locator(".live .figures")
    await expect(figures).to_contain_text(re.compile(r"first token after \d{1,2}\.\d\d s"))
    await page.click("button.danger")
    await expect(page.locator(".live .badge")).to_have_text("cancelled")


async def test_the_stream_is_taken_up_again_after_a_reload(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await send(page, "{{delay_ms=50 chunks=250}}", max_tokens="250")
    output = page.locator(".live .output")
    await expect(output).to_contain_text(" ")
    await page.goto("/playground")
    await page.click("section:has-text('Under way') a")
    await expect(output).to_contain_text(" ")
    await expect(page.locator(".live .badge")).to_have_text("completed", timeout=60_000)
    result = stack.api.get(f"/results/{page.url.rsplit('/', 1)[1]}").json()
    await page.click("text=Show as plain text")
    await expect(output).to_have_text(result["result"], use_inner_text=False)


async def test_stopping_keeps_the_text(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await send(page, "{{delay_ms=50 chunks=2000}}", max_tokens="2000")
    await expect(page.locator(".live .output")).to_contain_text(" ")
    await page.click("button.danger")
    await expect(page.locator(".live .badge")).to_have_text("cancelled")
    await expect(page.locator(".live .note")).to_contain_text("The request was stopped.")
    result = stack.api.get(f"/results/{page.url.rsplit('/', 1)[1]}").json()
    assert result["error"]["code"] == "cancelled"
    await expect(page.locator(".live .output")).not_to_be_empty()
    await assert_accessible(page)


async def test_a_chat_goes_on(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await page.check("input[value=chat]")
    await page.click("summary:has-text('System message')")
    await page.fill("#system", "Be brief.")
    await send(page, "Hello", max_tokens="5")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    first = stack.api.get(f"/results/{page.url.rsplit('/', 1)[1]}").json()
    await send(page, "And then?")
    await page.wait_for_url(lambda url: first["id"] not in url)
    await expect(page.locator(".live .badge")).to_have_text("completed")
    second = stack.api.get(f"/results/{page.url.rsplit('/', 1)[1]}").json()
    messages = stack.api.get(f"/contexts/{second['context_id']}").json()["messages"]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first["result"]},
        {"role": "user", "content": "And then?"},
    ]
    # A refusal appears below the chat, which continues unchanged.
    await send(page, "And now?", temperature="hot")
    await expect(page.locator("[role=alert]")).to_contain_text("temperature: must be a number")
    await expect(page.locator(".turn")).to_have_count(4)
    assert await page.input_value("#prompt") == "And now?"


async def test_a_default_stays_open(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await send(page, "{{chunks=3}}")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    assert await page.input_value("#p-max_tokens") == ""
    assert await page.get_attribute("#p-max_tokens", "placeholder") == "default: 512"


async def test_what_is_wrong_is_reported_and_nothing_is_lost(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await send(page, "Two\nlines <b>", temperature="hot", top_p="7")
    await expect(page.locator("[role=alert]")).to_contain_text("temperature: must be a number")
    assert await page.input_value("#prompt") == "Two\nlines <b>"
    assert await page.input_value("#p-temperature") == "hot"
    await send(page, "Two\nlines <b>", temperature="0.5", top_p="7")
    await expect(page.locator("[role=alert]")).to_contain_text("top_p")
    assert await page.input_value("#p-top_p") == "7"
    await assert_accessible(page)


async def test_output_is_text_and_never_markup(stack: Stack, page: Page) -> None:
    hostile = "<script>document.title='taken'</script> <img src=x onerror=alert(1)> [a](javascript:alert(1))"
    await page.goto("/playground")
    await page.check("input[value=chat]")
    await send(page, "{{text=" + hostile + " }}", max_tokens="100")
    output = page.locator(".live .output")
    await expect(page.locator(".live .badge")).to_have_text("completed")
    await expect(output).to_contain_text("<script>document.title='taken'</script>")
    assert await output.locator("script, img, a[href^=javascript]").count() == 0
    assert "taken" not in await page.title()


async def test_presets_stay_in_the_browser(stack: Stack, page: Page) -> None:
    await page.goto("/playground")
    await page.fill("#p-temperature", "0.3")
    await page.fill("#preset-name", "careful <i>")
    await page.click("text=Save as preset")
    await page.goto("/playground")
    assert await page.input_value("#p-temperature") == ""
    await page.select_option("#preset", "careful <i>")
    assert await page.input_value("#p-temperature") == "0.3"


async def test_the_programs_shown_work(stack: Stack, page: Page) -> None:
    parameters = {"max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["it's\n"]}
    result_id = stack.finish("it's {{chunks=3}}", parameters=parameters)
    await page.goto(f"/playground/{result_id}")
    await page.click("text=The same as a program")
    expected = stack.api.get(f"/results/{result_id}").json()["result"]
    names = page.locator("h3:has(+ pre)")
    await expect(names).to_have_text(["Python", "curl", "Python with openai"])
    commands = ["python", "-c"], ["bash", "-c"], ["python", "-c"]
    for place, command in enumerate(commands, 1):
        text = await page.locator(f"#snippet-{place}").text_content()
        assert text
        assert expected in run(*command, text)
    sent = stack.api.get("/results/", params={"limit": 3}).json()
    assert all(parameters.items() <= one["parameters"].items() for one in sent), sent


def run(*command: str) -> str:
    import subprocess
    import sys

    name, *rest = command
    program = sys.executable if name == "python" else name
    environment = os.environ | {"PYTHONPATH": str(ROOT / "client")}
    return subprocess.check_output([program, *rest], text=True, timeout=60, env=environment)
