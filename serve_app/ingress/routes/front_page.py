"""This module answers `GET /`: links to what is there, as JSON, or as HTML for a browser.

Clients need no key for it: it has the same text in every fleet, without models, versions and addresses. The chat page is not linked,
because an ingress does not know where it is.
"""

from collections.abc import Mapping

from starlette.responses import HTMLResponse, JSONResponse, Response

_LINKS = {
    "/v1/models": "the models",
    "/v1/chat/completions": "the API of OpenAI, by POST; its base URL is this page's with /v1",
    "/readyz": "whether requests can be answered, and why not",
    "/healthz": "whether this process is alive",
    "/metrics": "series for Prometheus",
}
_DOCS = "docs/start.md and docs/api.md of the release; serve-app up prints the address of its chat page"


class FrontPage:
    """The answer to `GET /`, in both forms."""

    def __init__(self, *, needs_keys: bool) -> None:
        said = {"service": "serve-app", "needs_key": needs_keys, "links": _LINKS, "documentation": _DOCS}
        self._json, self._html = JSONResponse(said).body, _page(needs_keys=needs_keys).encode()

    def answer(self, headers: Mapping[bytes, bytes]) -> Response:
        """Return HTML if the client's `Accept` names it, as every browser's does."""
        vary = {"Vary": "Accept"}
        if b"text/html" in headers.get(b"accept", b""):
            return HTMLResponse(self._html, headers=vary)
        return Response(self._json, headers=vary, media_type="application/json")


def _page(*, needs_keys: bool) -> str:
    rows = "\n".join(f'<li><a href="{to}">{to}</a>: {what}</li>' for to, what in _LINKS.items())
    key = "\n<p>Requests below /v1 need a key: <code>Authorization: Bearer KEY</code>.</p>" if needs_keys else ""
    return f"<!doctype html>\n<title>serve-app</title>\n<h1>serve-app</h1>\n<ul>\n{rows}\n</ul>{key}\n<p>{_DOCS}</p>\n"
