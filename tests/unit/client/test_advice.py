"""The client has an advice for each error code of the service."""

from app.core.errors import FailureCode
from llm_api_client.advice import ADVICE
from tests.unit.repository.test_docs import codes


def test_every_code_has_an_advice() -> None:
    assert codes() | {str(code) for code in FailureCode} <= ADVICE.keys()
