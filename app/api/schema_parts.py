"""Parts of the dialects' schemas: strict models, errors of validators, texts, members that are refused."""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, JsonValue
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(strict=True, extra="ignore")


def value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def without_nul(value: Any) -> Any:
    """A text with U+FFFD for NUL, which PostgreSQL cannot hold, or JSON with such texts; its keys stay.

    An agent sends files and outputs of programs, in each later turn again: one byte would end its session.
    """
    if isinstance(value, str):
        return value.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    if isinstance(value, list):
        return [without_nul(one) for one in value]
    if isinstance(value, dict):
        return {key: without_nul(member) for key, member in value.items()}
    return value


# A text for the model. Keys, names and ids are plain texts: they refuse NUL (`json_codec`).
ModelText = Annotated[str, AfterValidator(without_nul)]


def _refuse(value: Any) -> None:
    if value not in (None, False, "", [], {}, 0):
        raise PydanticCustomError("not_supported", "is not supported by this service")


Refused = Annotated[JsonValue, AfterValidator(_refuse)]
