"""The web page: four files from this package, served under a policy that lets them load nothing from outside."""

from __future__ import annotations

from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

__all__ = ["ui_file", "ui_root"]

_TYPES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "markdown.js": "text/javascript",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


async def ui_root(request: Request) -> Response:
    """GET /ui: the folder's own address, so that the page's parts are found."""
    return RedirectResponse("/ui/", 308)


async def ui_file(request: Request) -> Response:
    """GET /ui/NAME: one of the page's files, by a table; the name never reaches the file system."""
    name = request.path_params["name"] or "index.html"
    if name not in _TYPES:
        raise HTTPException(404)
    content = (files("edgellm.server") / "ui" / name).read_bytes()
    return Response(content, headers={**_HEADERS, "Content-Type": f"{_TYPES[name]}; charset=utf-8"})
