"""Client and web page have advice for each error code of the service."""

from app.core.errors import FailureCode
from app.ui.remedies import REMEDIES
from llm_api_client.advice import ADVICE
from tests.unit.repository.test_docs import codes

FAILURES = {str(code) for code in FailureCode}


def test_every_code_has_an_advice_of_the_client() -> None:
    missing = (codes() | FAILURES) - ADVICE.keys()
    assert not missing, "add them to client/llm_api_client/advice.py"


def test_every_failure_of_a_result_has_a_remedy_on_the_web_page() -> None:
    """Its page History offers these codes as a filter, too."""
    missing = FAILURES - REMEDIES.keys()
    assert not missing, "add them to app/ui/remedies.py"
