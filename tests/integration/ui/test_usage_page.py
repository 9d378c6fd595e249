"""The page of usage, without a browser: tables, plots, export, and teams for operators alone."""

from datetime import UTC, date, datetime

import asyncpg
import httpx
import pytest

from app.core.settings import Settings
from app.ui.main import create_ui
from app.ui.pages.usage import _charts, _months
from app.ui.settings import UiSettings
from tests.integration.auth.test_auth import guarded
from tests.integration.support import serve
from tests.integration.ui.test_history import visit
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

DAY = """INSERT INTO usage_days
  VALUES ($1, $2, $3, $4, '', 'completed', 3, 1234567, 0, 300, 0, 90000000)"""
PRICE = "INSERT INTO model_prices VALUES ('*', '2020-01-01', 1000000, 0, 0)"


async def test_a_month_with_its_costs(settings: Settings, connection: asyncpg.Connection) -> None:
    today = datetime.now(UTC).date()
    async with visit(settings) as (_, http):
        empty = await http.get("/usage")
        assert "No result ended in this month." in empty.text
        await connection.execute(DAY, "default", today, "key-<b>", "model-<i>")
        await connection.execute(DAY, "default", date(2026, 1, 31), "", "old")
        await connection.execute(DAY, "other", today, "hidden", "hidden")
        page = (await http.get("/usage")).text
        for text in ("1,234,567", "1 min 30 s", "key-&lt;b&gt;", "model-&lt;i&gt;", "completed"):
            assert text in page, text
        assert page.count('<figure class="chart">') == 2
        assert "&ndash;" in page or "\N{EN DASH}" in page  # no price is set
        assert "hidden</th>" not in page
        await connection.execute(PRICE)
        assert "1,234,567.00 USD" in (await http.get("/usage")).text
        assert "hidden</th>" in (await http.get("/usage?team=*")).text
        old = (await http.get("/usage?month=2026-01")).text
        assert "(unknown)" in old
        assert "model-" not in old
        for wrong in ("2026-13", "x", "99999-01", "2026-01-01"):
            assert "model-&lt;i&gt;" in (await http.get(f"/usage?month={wrong}")).text
        export = await http.get("/usage/export?month=2026-01&team=")
        assert export.headers["content-type"].startswith("text/csv")
        assert 'filename="usage-2026-01.csv"' in export.headers["content-disposition"]
        assert export.text.splitlines()[1].startswith("2026-01-31,,old,completed,3,3,0,0,1234567")


async def test_an_ordinary_token_gets_its_own_team(
    guarded: Settings, connection: asyncpg.Connection
) -> None:
    today = datetime.now(UTC).date()
    for team in ("red", "blue"):
        await connection.execute(DAY, team, today, f"{team}-key", "m")
    async with serve(guarded) as service:
        app = create_ui(UiSettings.model_validate({"api_url": str(service.client.base_url)}))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as http,
        ):
            token = sign({"team_id": "red", "token_id": "r"})
            signed = await http.post("/sign-in", data={"token": token})
            assert signed.status_code == 303, signed.text
            for path in ("/usage", "/usage?team=*", "/usage?team=blue"):
                page = await http.get(path)
                assert page.status_code == 200
                assert "red-key" in page.text
                assert "blue-key" not in page.text
                assert "All teams" not in page.text
            for team in ("*", "blue"):
                refused = await http.get(f"/usage/export?team={team}")
                assert refused.status_code == 403


def test_months_and_days_of_plots() -> None:
    assert _months(date(2026, 3, 31))[:4] == ["2026-03", "2026-02", "2026-01", "2025-12"]
    members = {"prompt_tokens": 1, "completion_tokens": 2, "cost": None}
    rows = [{"day": "2026-02-28", "model": f"m{number}", **members} for number in range(6)]
    tokens, cost = _charts({"rows": rows, "currency": "EUR"}, date(2026, 2, 1), date(2026, 3, 31))
    assert "EUR a day" in cost
    assert "the others" in tokens
    assert "28 Feb" in tokens
    with pytest.raises(KeyError):
        _charts({"rows": [{}], "currency": "EUR"}, date(2026, 2, 1), date(2026, 3, 31))
