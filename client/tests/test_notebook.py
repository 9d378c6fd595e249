"""Records in notebooks: texts of models never become markup."""

from llm_api_client import JobInfo, Result
from llm_api_client.jobs.records import JobCounts
from llm_api_client.notebook import duration
from llm_api_client.schemas import ResultError

EVIL = "<script>alert(1)</script> & 'x'"


def test_a_result() -> None:
    result = Result(
        id="r", state="failed", model_name=EVIL, result=f"a\n  {EVIL}",
        error=ResultError(code="model_error", message=EVIL),
    )  # fmt: skip
    shown = result._repr_html_()
    assert "<script>" not in shown
    assert "a\n  &lt;script&gt;" in shown
    assert "model_error" in shown


def test_a_job() -> None:
    counts = JobCounts(rows=8, pending=2, completed=5, failed=1)
    job = JobInfo(id="j", state="open", name=EVIL, total=12, counts=counts, errors={EVIL: 1})
    shown = job._repr_html_()
    assert "<script>" not in shown
    assert "width:50.0%" in shown
    assert "6 of 12, 1 failed" in shown
    assert "time left" not in shown
    assert "0 of" not in JobInfo(id="j", state="open")._repr_html_()


def test_the_time_that_is_left() -> None:
    shown = JobInfo(id="j", state="closed", estimated_seconds_left=125.4)._repr_html_()
    assert ">2:05<" in shown
    assert duration(3_723) == "1:02:03"
