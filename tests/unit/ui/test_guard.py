"""Names of the host that the page accepts."""

import httpx
import pytest

from app.ui.main import create_ui
from app.ui.settings import UiSettings


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/sign-in", "evil.example", 403),
        ("/static/page.css", "127.0.0.1:8888", 403),
        ("/static/page.css", "llm.example.org", 200),
        # The health check of a container calls it by an address.
        ("/ready", "127.0.0.1:8888", 200),
        ("/ready/", "127.0.0.1:8888", 403),
    ],
)
async def test_only_the_health_check_takes_any_host(path: str, host: str, status: int) -> None:
    page = create_ui(UiSettings(LLM_UI_ALLOWED_HOSTS="llm.example.org"))
    transport = httpx.ASGITransport(page)
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        answer = await client.get(path, headers={"Host": host})
        assert answer.status_code == status
        assert ("LLM_UI_ALLOWED_HOSTS" in answer.text) is (status == 403)
        assert path != "/ready" or answer.text == "ok"
        refused = await client.post("/ready", headers={"Sec-Fetch-Site": "cross-site"})
        assert refused.status_code == 403
