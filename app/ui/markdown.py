"""Model output as harmless HTML.

Markdown (CommonMark and tables) is rendered with raw HTML escaped, and the output is then sanitised by
an allow-list: the renderer is not a security boundary. No images: loading them would report to
another host that a person reads this text.
"""

import nh3
from markdown_it import MarkdownIt
from markupsafe import Markup

# Rendering takes about a millisecond a kilobyte, and more for odd input: longer texts are shown
# unformatted.
MAX_CHARACTERS = 50_000
_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}}

_renderer = MarkdownIt("commonmark", {"html": False, "maxNesting": 20}).enable(
    ["table", "strikethrough"]
)
_renderer.disable(["image"])


def can_render(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS


def render_markdown(text: str) -> Markup:
    """A model's text as HTML. Takes up to a few hundred milliseconds: not for the event loop."""
    tokens = _renderer.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            # Below the page's own headings.
            token.tag = f"h{min(6, int(token.tag[1]) + 2)}"
    html = _renderer.renderer.render(tokens, _renderer.options, {})
    return Markup(  # noqa: S704 - sanitised in this very line
        nh3.clean(
            html,
            tags=_TAGS,
            attributes=_ATTRIBUTES,
            url_schemes={"http", "https", "mailto"},
            link_rel="noopener noreferrer nofollow",
        )
    )
