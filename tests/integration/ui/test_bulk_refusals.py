"""Refusals of the Bulk page: jobs beyond a limit, files that are too large, and unknown names."""

from app.core.settings import Settings
from tests.integration.support import UNKNOWN_ID
from tests.integration.ui.visitor import MAPPING, visit


async def test_a_job_that_the_api_refuses(settings: Settings) -> None:
    limited = settings.model_copy(update={"team_max_jobs": 1})
    async with visit(limited) as visitor:
        await visitor.api.post("/jobs", json={})
        files = await visitor.files()
        sent = await visitor.send(b"prompt\na\n")
        assert sent.status_code == 429
        assert "1 jobs of your team have not ended" in sent.text
        assert 'value="3"' in sent.text  # what was entered is still there
        assert len(await visitor.files()) == len(files) + 1  # the uploaded one


async def test_uploads_that_are_too_large(settings: Settings) -> None:
    smaller = settings.model_copy(update={"max_file_bytes": 100_000})
    async with visit(smaller, max_upload_bytes=300_000) as visitor:
        refused = await visitor.upload(b"prompt\n" + b"x" * 400_000)
        assert refused.status_code == 413
        assert "larger than the 300,000 bytes" in refused.text
        refused = await visitor.upload(b"prompt\n" + b"x" * 200_000)
        assert refused.status_code == 413, refused.text
        assert 'role="alert"' in refused.text


async def test_what_is_not_there(settings: Settings) -> None:
    async with visit(settings) as visitor:
        for path in (
            "/bulk/jobs/x",
            "/bulk/files/file-x",
            "/bulk/jobs/x/results.xml",
            f"/bulk/jobs/{UNKNOWN_ID}",
            "/bulk/batches/files/x",
        ):
            assert (await visitor.http.get(path)).status_code == 404, path


async def test_a_file_of_the_api_that_is_too_large(settings: Settings) -> None:
    async with visit(settings, max_upload_bytes=1_000) as visitor:
        files = {"file": ("large.csv", b"prompt\n" + b"x\n" * 1_000)}
        made = await visitor.api.post("/v1/files", data={"purpose": "batch"}, files=files)
        shown = await visitor.http.get(f"/bulk/files/{made.json()['id']}")
        assert shown.status_code == 422
        assert "It is larger than 1,000 bytes." in shown.text


async def test_rows_that_are_nested_too_deep(settings: Settings) -> None:
    content = '{"prompt": "x"}\n{"prompt": ' + "[" * 500 + "]" * 500 + "}\n"
    async with visit(settings) as visitor:
        uploaded = await visitor.upload(content.encode(), "file.jsonl")
        shown = await visitor.http.get(uploaded.headers["location"])
        assert shown.status_code == 200
        assert "(The row is nested too deep.)" in shown.text
        sent = await visitor.http.post(
            uploaded.headers["location"], data=MAPPING | {"template": "It is {prompt}."}
        )
        assert sent.status_code == 422
        assert "1 of 2 lines cannot be sent." in sent.text


async def test_metadata_that_names_another_file(settings: Settings) -> None:
    async with visit(settings) as visitor:
        uploaded = await visitor.upload(b"prompt\none\n")
        file_id = uploaded.headers["location"].rpartition("/")[2]
        for odd in (file_id, "file-x", "../../x"):
            made = await visitor.api.post("/jobs", json={"metadata": {"bulk_rows": odd}})
            path = f"/bulk/jobs/{made.json()['id']}"
            await visitor.http.post(f"{path}/continue")
            text = await visitor.until_idle(path)
            assert 'class="note"' in text
            status = (await visitor.http.get(f"{path}/results.csv")).status_code
            assert status == (422 if odd == file_id else 200), odd
