"""Sphinx: the site that `make docs` makes of docs/*.md (https://www.sphinx-doc.org)."""

import re
import sys
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.highlighting import lexers

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

from docs.sphinx_site import api_reference, client_reference  # noqa: E402 - found by the line above

project = "LLM API Service"
root_doc = "README"
extensions = ["myst_parser"]
exclude_patterns = ["_build", "sphinx_site"]
myst_heading_anchors = 4
# The catalogue of errors has its codes as headings of the third level below a table.
suppress_warnings = ["myst.header"]
html_theme = "furo"
html_title = "LLM API Service"
html_show_sphinx = False
html_show_copyright = False
lexers["mermaid"] = TextLexer()

_CONTENTS = """
```{toctree}
:hidden:
:glob:

*
decisions/*
```
"""
# Files outside the site are named, not linked.
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./[^)]*|decisions/)\)")


def _prepare(_app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _OUTSIDE.sub(r"\1", source[0]) + (_CONTENTS if name == root_doc else "")


def _write_references(app: Sphinx) -> None:
    for name, text in (
        ("api.md", api_reference.render()),
        ("client_api.md", client_reference.render()),
    ):
        file = Path(app.srcdir, name)
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", _write_references)
    app.connect("source-read", _prepare)
