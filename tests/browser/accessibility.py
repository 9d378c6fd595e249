"""Violations on a page that axe-core (https://github.com/dequelabs/axe-core) finds."""

from pathlib import Path

import axe_playwright_python
from playwright.async_api import Page

_AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


async def assert_accessible(page: Page) -> None:
    """No violation that axe calls serious or critical, in light and dark, wide and as on a phone;
    and on a phone nothing to scroll sideways.
    """
    for scheme, width in (("light", 1280), ("dark", 375)):
        await page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        await page.set_viewport_size({"width": width, "height": 800})
        # Playwright's evaluate is not bound by the page's policy, unlike a script element.
        await page.evaluate(_AXE)
        found = await page.evaluate("axe.run().then((results) => results.violations)")
        assert [
            (one["id"], one["help"], [node["html"][:200] for node in one["nodes"]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ] == [], (scheme, width)
        content = await page.evaluate("document.documentElement.scrollWidth")
        assert content <= width, f"{content} pixels of content on {width}"
