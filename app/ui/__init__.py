"""The web page: a client of the public HTTP API only.

The server renders HTML by Jinja2; the browser adds little: small modules that follow a stream, refresh
a part of a page, keep presets. So a strict Content-Security-Policy holds, pages support keyboards and
screen readers as HTML does, and no state is kept between two requests: any replica serves any of
them.
"""
