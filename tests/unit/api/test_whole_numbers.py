"""Each integer of each body may be written as an integral number: `10.0`."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

import app.api.app  # noqa: F401 - its import fills the list of bodies
from app.api import raw_routes

VALUES = (1, 2, 8, 3600)  # one of them is within the bounds


def models_of(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models_of(field.annotation)
    for argument in get_args(annotation):
        yield from models_of(argument)


def has_integer(annotation: Any) -> bool:
    return annotation in (int, 1) or any(map(has_integer, get_args(annotation)))


def adapter_of(model: type[BaseModel], field: FieldInfo) -> TypeAdapter[Any]:
    """The field alone, as its model validates it."""
    annotated: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    config = ConfigDict(strict=bool(model.model_config.get("strict")))
    return TypeAdapter(annotated, config=config)


def accepts(adapter: TypeAdapter[Any], text: str) -> bool:
    try:
        adapter.validate_json(text)
    except ValidationError:
        return False
    return True


def integers() -> Iterator[tuple[str, TypeAdapter[Any], str, int]]:
    """Members that take an integer, or a list of such: an example, and its form."""
    models = {model for body in raw_routes.REFERENCED for model in models_of(body)}
    for model in sorted(models, key=lambda one: one.__name__):
        for name, field in model.model_fields.items():
            if model.__name__.endswith("Read") or not has_integer(field.annotation):
                continue
            adapter = adapter_of(model, field)
            for form in ("%s", "[%s]"):
                for value in VALUES:
                    if accepts(adapter, form % value):
                        yield f"{model.__name__}.{name}", adapter, form, value
                        break


def test_an_integral_number_is_an_integer() -> None:
    found, refused = set(), []
    for name, adapter, form, value in integers():
        found.add(name)
        texts = [form % text for text in (f"{value}.0", f"{value}e0", f"{value / 10}e1")]
        refused += [f"{name} = {text}" for text in texts if not accepts(adapter, text)]
    assert not refused
    assert {"SamplingParameters.top_k", "ChatRequest.max_tokens", "JobCreate.total"} <= found
