"""Long and hostile outputs: they are shown as they come, in pieces, and do no harm."""

from playwright.async_api import Page, expect

from tests.browser.conftest import Stack

# Changes of the text while it grows: added nodes, and nodes with text that are removed or changed. At the
# end all of it is replaced by the whole answer.
_WATCH = """() => {
  window.seen = { added: 0, undone: 0 };
  const output = document.querySelector(".live .output");
  new MutationObserver((records) => {
    if (!output.isConnected) return;
    for (const { type, addedNodes, removedNodes } of records) {
      seen.added += addedNodes.length;
      seen.undone += [...removedNodes].filter((node) => node.textContent).length;
      seen.undone += type === "characterData" ? 1 : 0;
    }
  }).observe(output, { childList: true, subtree: true, characterData: true });
}"""
_HOSTILE = (
    "<script>document.title='taken'</script>",
    "<img/src=x/onerror=document.title='taken'>",
    "**[a](javascript:document.title='taken')**",
    "|a|b|",
    "![x](http://192.0.2.1/x.png)",
)


async def test_ten_thousand_tokens_are_added_and_none_is_drawn_again(
    stack: Stack, page: Page
) -> None:
    result_id = stack.send(
        "{{delay_ms=1 first_delay_ms=1500}} long", parameters={"max_tokens": 10_000}
    )
    await page.goto(f"/playground/{result_id}")
    await page.evaluate(_WATCH)
    await expect(page.locator(".live .badge")).to_have_text("completed", timeout=60_000)
    seen = await page.evaluate("seen")
    assert seen["undone"] == 0
    # Drawn by the frame, not by the token.
    assert 10 < seen["added"] < 5_000
    await expect(page.locator(".live .figures")).to_contain_text("10,000 tokens")


async def test_two_hundred_kilobytes_of_hostile_markdown(stack: Stack, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    words = " ".join(_HOSTILE * (200_000 // len(" ".join(_HOSTILE))))
    for prompt, expected in (
        ("{{text=" + words + " }}", 190_000),
        ("{{text=" + words[:40_000] + " }}", 30_000),
    ):
        sent = {
            "model": "scripted",
            "messages": [{"role": "user", "content": prompt}],
            "parameters": {"max_tokens": 100_000},
        }
        result_id = stack.api.post("/results/", json=sent).json()["id"]
        result = stack.api.get(f"/results/{result_id}", params={"wait": 60}).json()
        assert len(result["result"]) > expected
        for path in (f"/playground/{result_id}", f"/history/{result_id}"):
            await page.goto(path)
            output = page.locator(".live .output")
            await expect(output).to_contain_text("<script>document.title='taken'</script>")
            assert await output.locator("script, img, a[href^=javascript]").count() == 0
            assert "taken" not in await page.title()
    assert not [url for url in asked if not url.startswith(stack.url)]
