"""Models and servers, Launch, System: what operators see and do, and what others do not."""

import json
import os
import re
import signal
from pathlib import Path

from playwright.async_api import Dialog, Page, expect

from app.core.ids import new_id
from app.core.settings import Settings
from tests.browser.conftest import Secured, Stack, assert_accessible
from tests.conftest import ROOT, connect

EVIL = "<img src=x onerror=document.title='taken'><b>\"'"
DEMO = str(ROOT / "models" / "demo")


async def execute(stack: Stack, statement: str, *arguments: object) -> None:
    connection = await connect(Settings.model_validate(dict(stack.environment)))
    try:
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


def agree(page: Page) -> list[str]:
    """Confirm each question from now on; returns the questions."""
    asked: list[str] = []

    async def accept(dialog: Dialog) -> None:
        asked.append(dialog.message)
        await dialog.accept()

    page.on("dialog", accept)
    return asked


async def assert_no_markup(page: Page) -> None:
    assert await page.locator("main img, main b:has-text('\"')").count() == 0
    assert "taken" not in await page.title()


# --- Models and servers -------------------------------------------------------------------------------


async def test_servers_are_registered_drained_and_removed(stack: Stack, page: Page) -> None:
    await page.goto("/models")
    await expect(page.locator("#models tr", has_text="scripted").locator(".badge")).to_have_text(
        "ready"
    )
    asked = agree(page)
    await page.click("#register summary")
    await page.fill("#server-name", "second")
    await page.fill("#server-grpc", "nowhere")
    await page.click("#register button")
    await expect(page.locator("[role=alert]")).to_contain_text("grpc: must be host:port")
    assert await page.input_value("#server-name") == "second"
    await page.fill("#server-grpc", "127.0.0.1:9")
    await page.click("#register button")
    row = page.locator("#servers-table tr", has_text="second")
    await expect(row).to_contain_text("no answer")
    await assert_accessible(page)
    await page.click("button[aria-label='Drain second']")
    await expect(row).to_contain_text("draining")
    await page.click("button[aria-label='Resume second']")
    # A page between two has no row: wait for what the next one shows.
    await expect(page.locator("button[aria-label='Drain second']")).to_be_visible()
    await expect(row).not_to_contain_text("draining")
    await page.click("button[aria-label='Remove second']")
    await expect(page.locator("#models")).to_be_visible()
    await expect(row).to_have_count(0)
    assert [question.partition("?")[0] for question in asked] == ["Drain second", "Remove second"]
    assert "second" not in [one["name"] for one in stack.api.get("/servers").json()]


async def test_nothing_is_removed_unasked_while_scripts_load(stack: Stack, page: Page) -> None:
    """The page's module is loaded last, and a slow network needs time for it."""
    stack.api.post("/servers", json={"name": "kept", "grpc": "127.0.0.1:9"}).raise_for_status()
    await page.route("**/page*.js*", lambda route: route.abort())
    await page.goto("/models")
    questions: list[str] = []

    async def refuse(dialog: Dialog) -> None:
        questions.append(dialog.message)
        await dialog.dismiss()

    page.on("dialog", refuse)
    await page.click("button[aria-label='Remove kept']")
    assert questions[0].startswith("Remove kept?")
    await page.reload()
    await expect(page.locator("#servers-table tr", has_text="kept")).to_be_visible()
    stack.api.delete("/servers/kept").raise_for_status()


async def test_a_form_is_sent_once(stack: Stack, page: Page) -> None:
    await page.goto("/models")
    await page.click("#register summary")
    await page.fill("#server-name", "once")
    await page.fill("#server-grpc", "127.0.0.1:9")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    await page.evaluate(
        """() => {
            const form = document.querySelector("#server-name").form;
            form.requestSubmit();
            setTimeout(() => form.requestSubmit(), 0);
        }"""
    )
    await expect(page.locator("#servers-table tr", has_text="once")).to_be_visible()
    assert sent.count("POST") == 1
    stack.api.delete("/servers/once").raise_for_status()


async def test_a_model_is_unloaded(stack: Stack, page: Page) -> None:
    await page.goto("/models")
    asked = agree(page)
    row = page.locator("#models tr", has_text="scripted")
    assert stack.pid is not None
    # `up` must not load it before the page has shown that it is missing.
    os.kill(stack.pid, signal.SIGSTOP)
    try:
        await page.click("button[aria-label='Unload scripted']")
        await expect(row).to_contain_text("not ready")
    finally:
        os.kill(stack.pid, signal.SIGCONT)
    assert "Queued results wait" in asked[0]
    # `up` finds that its model is missing, and loads it again.
    await expect(row.locator(".badge")).to_have_text("ready", timeout=60_000)


# --- Launch -------------------------------------------------------------------------------------------


async def test_what_fits_fills_the_form_and_the_script_is_shown(page: Page) -> None:
    await page.goto("/launches/new")
    await page.fill("#f-model", DEMO)
    await page.fill("#f-concurrency", "4")
    await page.fill("#f-gpu_kinds", "l4, h100")
    await page.click("button:has-text('What fits?')")
    rows = page.locator("[aria-label='On which GPUs it fits'] tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.first).to_contain_text("fits")
    await page.click("button[aria-label='Take 1 L4']")
    await expect(page.locator("#f-resources-gpus")).to_have_value("1")
    await expect(page.locator("#f-time_limit_minutes")).to_have_value("70")
    await page.fill("#f-name", "no name!")
    await page.click("button:has-text('Show the script')")
    await expect(page.locator("#f-name-help .wrong")).to_be_visible()
    await expect(page.locator("#f-resources-gpus")).to_have_value("1")
    await page.fill("#f-name", "demo-again")
    await page.click("button:has-text('Show the script')")
    await expect(page.locator("#script")).to_contain_text("#!/bin/bash")
    await expect(page.locator("#script")).to_contain_text("--load-model=demo")
    await assert_accessible(page)


async def test_what_fits_of_a_pasted_config(page: Page) -> None:
    await page.goto("/launches/new")
    await page.click("#config summary")
    await page.fill("#f-config", "[not json")
    await page.click("button:has-text('What fits?')")
    await expect(page.locator("[role=alert]")).to_contain_text("paste the whole config.json")
    await page.fill("#f-config", Path(DEMO, "1", "config.json").read_text())
    await page.click("button:has-text('What fits?')")
    await expect(page.locator("#plan")).to_contain_text("llama")


LARGE = {
    "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip


async def test_several_nodes_for_a_large_model(page: Page) -> None:
    """405 billion parameters: 812 GB of weights, of which a node of 8 H100 holds 640."""
    await page.goto("/launches/new")
    await page.click("#config summary")
    await page.fill("#f-config", json.dumps(LARGE))
    await page.fill("#f-gpu_kinds", "h100-80")
    await page.fill("#f-max_nodes", "65")
    await page.click("button:has-text('What fits?')")
    await expect(page.locator("#f-max_nodes-help .wrong")).to_be_visible()
    await page.fill("#f-max_nodes", "")
    await page.click("button:has-text('What fits?')")
    row = page.locator("[aria-label='On which GPUs it fits'] tbody tr")
    await expect(row).to_contain_text("does not fit")
    await page.fill("#f-max_nodes", "4")
    await page.click("button:has-text('What fits?')")
    await expect(row).to_contain_text("2 nodes, each 8")
    await page.click("button[aria-label^='Take 2 nodes, each with 8']")
    await expect(page.locator("#f-resources-nodes")).to_have_value("2")
    await expect(page.locator("#f-resources-gpus")).to_have_value("8")
    await expect(page.locator("#plan ~ [role=status]")).to_contain_text("2 nodes, each with 8 H100")
    await assert_accessible(page)


async def test_options_of_the_engine_are_checked_and_shown(page: Page) -> None:
    await page.goto("/launches/new")
    await page.fill("#f-model", DEMO)
    await page.fill("#f-name", "tuned")
    await page.click("#engine > summary")
    await page.click("#engine summary:has-text('Scheduling')")
    await page.fill("#f-engine-max_num_seqs", "many")
    await page.select_option("#f-engine-scheduling_policy", "priority")
    await page.select_option("#f-engine-enable_chunked_prefill", "false")
    await page.click("button:has-text('Show the script')")
    wrong = page.locator("#f-engine-max_num_seqs-help .wrong")
    await expect(wrong).to_have_text("must be a whole number")
    await assert_accessible(page)
    await page.fill("#f-engine-max_num_seqs", "8")
    await page.click("button:has-text('Show the script')")
    settings = json.loads(await page.locator("#model-json").inner_text())
    assert settings.items() >= {
        "max_num_seqs": 8, "scheduling_policy": "priority", "enable_chunked_prefill": False,
    }.items()  # fmt: skip
    await expect(page.locator("#f-engine-max_num_seqs")).to_be_visible()
    wide = """all => all.filter(one => one.getBoundingClientRect().right
        > one.parentElement.getBoundingClientRect().right + 1).map(one => one.innerText)"""
    assert await page.locator("#engine label").evaluate_all(wide) == []


async def test_a_launch_is_followed_to_its_end_and_deleted(stack: Stack, page: Page) -> None:
    await page.goto("/launches/new")
    await page.fill("#f-model", f"{DEMO}-absent")
    await page.fill("#f-name", "absent")
    await page.click("section button:has-text('Launch')")
    await expect(page.locator("h1")).to_have_text("Launch absent")
    await expect(page.locator(".headline .badge")).to_have_text("failed")
    await expect(page.locator("p.reason")).to_contain_text("it is not a model")
    await assert_accessible(page)
    launch_id = page.url.rsplit("/", 1)[1]
    await execute(
        stack, "UPDATE launches SET reason = $1::text, log = $1::text, model = $1::text", EVIL
    )
    await page.reload()
    await expect(page.locator("p.reason")).to_contain_text(EVIL)
    await expect(page.locator("#log")).to_contain_text(EVIL)
    await assert_no_markup(page)
    await page.goto("/launches")
    await expect(page.locator("#launches")).to_contain_text(EVIL)
    await assert_accessible(page)
    agree(page)
    await page.click(f"#launch-{launch_id}")
    await page.click("#delete")
    await expect(page.locator("main")).to_contain_text("Nothing has been launched yet.")


DOWNLOAD = """
INSERT INTO model_downloads (id, team_id, profile, model, revision, done_bytes, total_bytes)
VALUES ($2::uuid, 'default', 'elsewhere', $1::text, 'main', 2500000, 10000000)
"""  # no worker takes it


async def test_models_are_downloaded(stack: Stack, page: Page) -> None:
    await execute(stack, DOWNLOAD, "owner/waits", str(new_id()))
    await page.goto("/launches")
    await page.click("nav.tabs >> text=Downloads")
    row = page.locator("#downloads tbody tr", has_text="owner/waits")
    await expect(row).to_contain_text("2.5 MB of 10 MB")
    await expect(row.locator("progress")).to_have_attribute("value", "2500000")
    await assert_accessible(page)
    agree(page)
    await row.locator("button:has-text('Cancel')").click()
    await expect(row.locator(".badge")).to_have_text("cancelled")
    await row.locator("button:has-text('Continue')").click()
    await expect(page.locator("#f-profile-help .wrong")).to_contain_text("there is no such profile")
    await expect(page.locator("#f-model")).to_have_value("owner/waits")
    await page.fill("#f-model", "no name")
    await page.click("button:has-text('Download')")
    await expect(page.locator("#f-model-help .wrong")).to_contain_text("a Hugging Face id")
    # The hub need not be reached: a failed download has a row, too.
    await page.fill("#f-model", "owner/asked")
    await page.click("button:has-text('Download')")
    await expect(page.locator("#downloads")).to_contain_text("owner/asked")
    await execute(
        stack,
        "UPDATE model_downloads SET state = 'cancelled', ended_at = now() WHERE ended_at IS NULL",
    )
    ended = "UPDATE model_downloads SET state = 'completed', ended_at = now(), reason = $1::text, commit = 'c0ffee' WHERE model = 'owner/waits'"  # fmt: skip
    await execute(stack, ended, EVIL)
    await expect(row).to_contain_text(EVIL)
    await assert_no_markup(page)
    await row.locator("text=Launch").click()
    await expect(page.locator("#f-model")).to_have_value("owner/waits")
    await expect(page.locator("#f-revision")).to_have_value("c0ffee")


async def test_vast_is_explained_step_by_step(page: Page) -> None:
    await page.goto("/launches")
    await page.click("text=Vast.ai")
    for command in re.findall(r"^make ([\w.-]+)", (ROOT / "docs" / "vast.md").read_text(), re.M):
        if command != "-C":
            await expect(page.locator("main")).to_contain_text(f"make {command}")
    await assert_accessible(page)


# --- System -------------------------------------------------------------------------------------------


async def test_the_system_at_a_glance(stack: Stack, page: Page) -> None:
    stack.finish("{{fail}}")
    sample = "INSERT INTO queue_samples (minute, name, queued, running) VALUES (date_trunc('minute', now()), $1, 7, 1)"  # fmt: skip
    await execute(stack, sample, EVIL)
    await page.goto("/system")
    await expect(page.locator(".tile", has_text="Workers alive").locator("dd")).to_have_text(
        re.compile(r"[1-9]")
    )
    await expect(page.locator("figure.chart")).to_have_count(6)
    await expect(page.locator(".chart-legend, .chart").first).to_contain_text(EVIL)
    await assert_no_markup(page)
    # Open details stay open when the part is fetched again.
    await page.click("figure >> nth=0 >> summary")
    async with page.expect_response("**/system/part?minutes=60"):
        pass
    await expect(page.locator("figure details").first).to_have_attribute("open", "")
    await assert_accessible(page)
    await page.click("text=24 hours")
    await expect(page.locator("#largest-tables")).to_contain_text("results")
    await expect(page.locator("nav a[aria-current=true]")).to_have_text("24 hours")


async def test_the_usage_of_a_month(stack: Stack, page: Page) -> None:
    stack.finish("{{chunks=3}}")
    use = """INSERT INTO usage_days VALUES ('default', (now() AT TIME ZONE 'UTC')::date, $1, $1, '', 'completed',
      1, 20, 0, 30, 0, 4000000)"""
    await execute(stack, use, EVIL)
    budget = "INSERT INTO budgets (team_id, token_id, max_tokens) VALUES ('default', $1, 1000000)"
    await execute(stack, budget, EVIL)
    await page.goto("/usage")
    await expect(page.locator("figure.chart")).to_have_count(2)
    for table in ("#budgets", "#by-model", "#by-key"):
        await expect(page.locator(table)).to_contain_text(EVIL)
    await assert_no_markup(page)
    await assert_accessible(page)
    async with page.expect_download() as download:
        await page.click("text=Export the month as CSV")
    assert (await download.value).suggested_filename.startswith("usage-")
    await page.select_option("#team", "*")
    await page.click("button:has-text('Show')")
    await expect(page.locator("#by-team")).to_contain_text("default")


# --- Scopes -------------------------------------------------------------------------------------------


async def sign_in(page: Page, secured: Secured, *options: str) -> None:
    await page.goto(f"{secured.url}/sign-in?next=/models")
    await page.fill("#token", secured.token("red", *options))
    await page.click("button.primary")
    await expect(page.locator("h1")).to_have_text("Models and servers")


async def test_an_ordinary_token_sees_no_operators_controls(secured: Secured, page: Page) -> None:
    await sign_in(page, secured)
    await expect(page.locator("#models")).to_contain_text("scripted")
    for text in ("Servers", "Unload", "Register", "Change"):
        assert text not in await page.inner_text("main")
    assert await page.locator("main form").count() == 0
    assert await page.locator("nav a[href='/system']").count() == 0
    await assert_accessible(page)
    await page.goto(f"{secured.url}/launches")
    await page.click("nav a[href='/launches/new']")
    await expect(page.locator("main button")).to_have_text(["What fits?"])
    await page.fill("#f-model", DEMO)
    await page.click("button:has-text('What fits?')")
    await expect(page.locator("#plan")).to_contain_text("llama")
    assert await page.locator("button:has-text('Take')").count() == 0
    # A request by other means is refused with a message.
    await page.goto(f"{secured.url}/system")
    await expect(page.locator("main")).to_contain_text("operate")
    await page.evaluate(
        """() => {
          const form = document.createElement("form");
          form.method = "post"; form.action = "/models/unload";
          form.innerHTML = '<input name="name" value="scripted">';
          document.body.append(form); form.submit();
        }"""
    )
    await expect(page.locator("[role=alert]")).to_contain_text("operate")


async def test_an_operator_sees_them(secured: Secured, page: Page) -> None:
    await sign_in(page, secured, "--scopes", "use,operate")
    await expect(page.locator("button[aria-label='Unload scripted']")).to_be_visible()
    await page.click("nav a:has-text('System')")
    await expect(page.locator("h1")).to_have_text("System")
