"""`Guarded` decides what the pages' server answers, whom it answers, and what a browser may load for its pages. Without Gradio."""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    [
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio's page contains scripts, and makes functions of `js=` texts
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "object-src 'none'",
        "frame-src 'none'",
        "base-uri 'self'",  # Gradio's page has a <base>
        "form-action 'none'",
        "frame-ancestors 'self'",
    ]
)
"""The Content-Security-Policy of each response.

Answers are shown as Markdown, which may contain HTML. Without the policy, an image, a video or a form in an answer could send the prompt to
another host. Gradio removes scripts from answers before it shows them.
"""

_PATHS = frozenset(
    {
        "/",
        "/fleet",
        "/fleet/",
        "/healthz",
        "/config",
        "/theme.css",
        "/favicon.ico",
        "/robots.txt",
        "/gradio_api/app_id",
        "/gradio_api/info",
        "/gradio_api/queue/join",
        "/gradio_api/queue/data",
        "/gradio_api/run/predict",
    }
)
_FOLDERS = ("/assets/", "/static/", "/gradio_api/heartbeat/")


class Guarded:
    """Refuses requests that the pages do not need, and adds `POLICY` to each response.

    Gradio has more routes than these pages use. Its `upload`, `deep_link` and `process_recording` write files for any client, and
    `file=URL` makes this process ask another host: an image with that path in an answer would pass `POLICY`. So only `_PATHS` and
    `_FOLDERS` are answered.

    Gradio also accepts requests from pages of other sites, which may read the answers unless this server is at localhost. Such a page, open
    in the user's browser, must not use the service in the user's name, so a request with another site's `Origin` is refused.

    Starlette's own base for middleware is not used, because it hinders streams.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["content-security-policy"] = POLICY
            await send(message)

        app = self._app
        if scope["type"] == "http":
            headers, path = Headers(scope=scope), scope["path"]
            is_known = path in _PATHS or path.startswith(_FOLDERS)
            if not is_known or _is_embedded_stream(path, headers):
                app = PlainTextResponse("The pages have no such path.\n", 404)
            elif _is_of_another_site(headers):
                app = PlainTextResponse("The pages answer only their own site: Origin and Host differ.\n", 403)
        await app(scope, receive, send_with_policy)


def _is_of_another_site(headers: Headers) -> bool:
    """Return whether a page of another site sent this request. A link from another site to the pages carries no `Origin`.

    Browsers send `Sec-Fetch-Site` only to HTTPS and to localhost. Elsewhere `Origin` is compared with the host that the browser asked;
    a proxy that changes `Host` sends the original host in `X-Forwarded-Host`.
    """
    origin = headers.get("origin")
    if origin is None or headers.get("sec-fetch-site") == "same-origin":
        return False
    try:
        url = urlsplit(origin)
    except ValueError:
        return True
    port = {"http": ":80", "https": ":443"}.get(url.scheme, "")  # some proxies add the default port
    asked = {host.strip() for name in ("host", "x-forwarded-host") for host in headers.get(name, "").split(",")}
    return not url.netloc or asked.isdisjoint({url.netloc, url.netloc + port})


def _is_embedded_stream(path: str, headers: Headers) -> bool:
    """Return whether an image or a video in an answer asks for a stream of Gradio's: six of them would use up a browser's connections."""
    return path.startswith("/gradio_api/") and headers.get("sec-fetch-dest") in {"image", "audio", "video"}
