"""Serves the files of the live page (docs/ui.md): the same bytes for every deployment, so they need no token."""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

PATH: Final = "/ui/"
FOLDER: Final = Path(__file__).with_name("page")
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Names come from pods and clients: a browser that knows these types refuses to parse text as HTML.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return the routes of the page's files, which are read here, once."""
    files = {file.name: (file.read_bytes(), TYPES[file.suffix]) for file in FOLDER.iterdir()}
    files[""] = files.pop("index.html")

    async def file(request: Request) -> Response:
        content = files.get(request.path_params.get("name", ""))
        if content is None:
            return Response("the page has no such file\n", 404, HEADERS, "text/plain")
        return Response(content[0], 200, HEADERS, content[1])

    async def with_slash(request: Request) -> Response:
        return RedirectResponse(PATH, headers=HEADERS)

    return [Route(PATH + "{name}", file), Route(PATH.rstrip("/"), with_slash), Route(PATH, file)]
