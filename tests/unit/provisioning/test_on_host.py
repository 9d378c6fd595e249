"""The program that runs by a host's own Python, which may be an old one without a library."""

import ast
import inspect
import sys
from http.client import HTTPMessage
from io import BytesIO
from urllib.request import Request

import pytest

from app.provisioning.model_download import _MODULES, _OLDEST_PYTHON
from app.provisioning.on_host.hub import DownloadError, Redirects


@pytest.mark.parametrize("module", _MODULES, ids=lambda one: one.__name__)
def test_it_needs_an_old_python_and_its_library_only(module: object) -> None:
    tree = ast.parse(inspect.getsource(module), feature_version=_OLDEST_PYTHON)  # type: ignore[arg-type]
    imported = {one.module or "" for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)}
    imported |= {
        name.name for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names
    }
    sent = {one.__name__ for one in _MODULES}
    assert {
        name for name in imported - sent if name.split(".")[0] not in sys.stdlib_module_names
    } == set()


def redirected(source: str, target: str) -> str | None:
    """The token that is sent to the target."""
    request = Request(source)  # noqa: S310
    request.add_unredirected_header("Authorization", "Bearer x")
    new = Redirects().redirect_request(request, BytesIO(), 302, "", HTTPMessage(), target)
    assert new is not None
    return new.get_header("Authorization")


def test_redirects_take_the_token_nowhere_else() -> None:
    assert redirected("https://hub/a", "https://hub/b") == "Bearer x"
    assert redirected("https://hub/a", "https://storage/b") is None
    assert redirected("https://hub/a", "https://hub:444/b") is None
    assert redirected("http://hub/a", "https://hub/b") is None
    for target in ("http://hub/b", "ftp://hub/b"):
        with pytest.raises(DownloadError, match="without TLS"):
            redirected("https://hub/a", target)
