"""Records of the client have the members of the service's responses."""

from app.api.native.schemas import ExportRead
from llm_api_client.schemas import Result


def test_a_result_has_the_members_of_a_response() -> None:
    missing = ExportRead.model_fields.keys() - set(Result.__struct_fields__)
    assert not missing, "add them to Result in client/llm_api_client/schemas.py"
