"""Parts of the dialects' schemas: strict models, errors of validators, members that are refused."""

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, JsonValue
from pydantic_core import PydanticCustomError

STRICT = ConfigDict(strict=True, extra="ignore")


def value_error(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _refuse(value: Any) -> None:
    if value not in (None, False, "", [], {}, 0):
        raise PydanticCustomError("not_supported", "is not supported by this service")


Refused = Annotated[JsonValue, AfterValidator(_refuse)]
