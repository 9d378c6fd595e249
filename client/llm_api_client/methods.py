"""Methods of the two clients, made from the operations that they share."""

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import GenericAlias
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_args, get_origin

from llm_api_client.driver import AsyncDriver, Driver
from llm_api_client.steps import Call, Emit, Feed

P = ParamSpec("P")
T = TypeVar("T")


class Blocking(Protocol):
    """An object whose methods return when the work is done."""

    @property
    def driver(self) -> Driver: ...


class Awaiting(Protocol):
    """An object whose methods are awaited."""

    @property
    def driver(self) -> AsyncDriver: ...


def call(operation: Callable[P, Call[T]]) -> Callable[Concatenate[Blocking, P], T]:
    """A method that performs an operation and returns its result."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.driver.run(operation(*args, **kwargs))

    return present(method, operation)


def feed(operation: Callable[P, Feed[T]]) -> Callable[Concatenate[Blocking, P], Iterator[T]]:
    """A method that returns an iterator over the items of an operation."""

    def method(self: Blocking, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self.driver.iterate(operation(*args, **kwargs))

    return present(method, operation, _iterator_of(Iterator, operation))


def async_call(
    operation: Callable[P, Call[T]],
) -> Callable[Concatenate[Awaiting, P], Awaitable[T]]:
    """As `call`, to be awaited."""

    async def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.driver.run(operation(*args, **kwargs))

    return present(method, operation)


def async_feed(
    operation: Callable[P, Feed[T]],
) -> Callable[Concatenate[Awaiting, P], AsyncIterator[T]]:
    """As `feed`, to be iterated with `async for`."""

    def method(self: Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        return self.driver.iterate(operation(*args, **kwargs))

    return present(method, operation, _iterator_of(AsyncIterator, operation))


M = TypeVar("M", bound=Callable[..., Any])


def _iterator_of(kind: type[Any], operation: Callable[..., Any]) -> GenericAlias:
    """The type of an iterator over the items that an operation emits."""
    step = get_args(inspect.signature(operation).return_annotation)[0]
    item = next(get_args(one)[0] for one in get_args(step) if get_origin(one) is Emit)
    return GenericAlias(kind, (item,))


def present(method: M, operation: Callable[..., Any], returns: Any = None) -> M:
    """Give a method the name, the documentation and the signature of its operation, for `help`."""
    functools.update_wrapper(method, operation)
    signature = inspect.signature(operation)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    if returns is None:  # of `Call[Result]` a Result
        returns = get_args(signature.return_annotation)[-1]
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()], return_annotation=returns
    )
    return method
