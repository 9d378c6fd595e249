"""Edits of modules that are imported already: functions get new code, constants new values."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tools.mutation.mutants import Mutant
from tools.mutation.uses import Uses


def patch(root: Path, mutant: Mutant, uses: Uses) -> bool:
    """Make this process run the mutant; return False if only a new import can."""
    module = sys.modules.get(mutant.module)
    if module is None:
        return False
    text = mutant.apply(root)
    top = mutant.scope.partition(".")[0]
    constants = uses.constants(mutant.path, top)
    if constants and not inspect.isclass(getattr(module, top, None)):
        return _rebuild(root, {mutant.path: text}, constants, uses)
    function = _find_function(module, mutant.scope)
    return function is not None and _replace_code(function, _compiled(root, mutant.path, text))


def _rebuild(
    root: Path, texts: dict[str, bytes], constants: set[tuple[str, str]], uses: Uses
) -> bool:
    """Run the modules of the constants again beside the real ones, and take the new values.

    A constant may be made of another module's, so that each module runs as often as there are modules.
    """
    paths = [*texts, *sorted({path for path, _ in constants} - set(texts))]
    codes = {path: _compiled(root, path, texts.get(path)) for path in paths}
    for path in paths * len(paths):
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = sys.modules.get(name)
        again = ModuleType(name)
        again.__file__ = str(root / path)
        try:
            exec(codes[path], again.__dict__)  # noqa: S102 - our own module, edited
        except Exception:  # noqa: BLE001 - such as a metric that exists already
            return False
        if module is None or not _take_values(module, again, path, constants, uses):
            return False
    return True


def _take_values(
    module: ModuleType,
    again: ModuleType,
    path: str,
    constants: set[tuple[str, str]],
    uses: Uses,
) -> bool:
    for name, value in vars(again).items():
        old = vars(module).get(name)
        if isinstance(value, FunctionType) and isinstance(old, FunctionType):
            is_own = value.__module__ == module.__name__
            if is_own and value.__code__.co_freevars == old.__code__.co_freevars:
                old.__code__, old.__defaults__ = value.__code__, value.__defaults__
                old.__kwdefaults__ = value.__kwdefaults__
        elif (path, name) in constants:
            if type(value).__module__ == module.__name__:
                return False  # of a class that nothing else knows
            setattr(module, name, value)
            for user, alias in uses.aliases(path, name):
                if other := sys.modules.get(user.removesuffix(".py").replace("/", ".")):
                    setattr(other, alias, value)
    return True


def _replace_code(function: FunctionType, code: CodeType) -> bool:
    for one in _codes(code):
        same_place = one.co_firstlineno == function.__code__.co_firstlineno
        if one.co_qualname == function.__code__.co_qualname and same_place:
            if one.co_freevars != function.__code__.co_freevars:
                return False
            function.__code__ = one
            return True
    return False


def _find_function(module: object, scope: str) -> FunctionType | None:
    """Return the outermost function of a scope such as `Class.method.inner`."""
    found = module
    for name in scope.split("."):
        found = inspect.getattr_static(found, name, None)
        if isinstance(found, staticmethod | classmethod):
            found = found.__func__
        elif isinstance(found, property):
            found = found.fget
        elif isinstance(found, functools.cached_property):
            found = found.func
        if callable(found) and not inspect.isclass(found):
            function: Callable[..., object] = inspect.unwrap(found)
            return function if isinstance(function, FunctionType) else None
    return None


def _compiled(root: Path, path: str, text: bytes | None) -> CodeType:
    text = (root / path).read_bytes() if text is None else text
    return compile(text, str(root / path), "exec", dont_inherit=True)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
