"""The web page: a client of the public HTTP API, and of nothing else.

HTML is rendered here, by Jinja2; the browser adds little: small modules that follow a stream, refresh
a part of a page, keep presets. So a strict Content-Security-Policy holds, pages work by keyboard and
for screen readers as HTML does, and no state is kept between two requests: any replica serves any of
them.
"""
