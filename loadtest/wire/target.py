"""The target is the server under test: its address, and the requests that check it before the load starts."""

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from loadtest.errors import UsageError
from loadtest.wire.sse import error_message, shorten
from loadtest.wording import is_writable, shown

ANSWER_WITHIN_S = 10.0
MAX_PAGE_BYTES = 16 * 1024 * 1024
"""Largest list of models or page of metrics; a larger answer comes from something else."""
MAX_NAMES = 1000
"""An error lists the names of models in at most so many characters."""
API_KEY_VARIABLE = "LOADTEST_API_KEY"
CA_VARIABLE = "SSL_CERT_FILE"
"""The variable that names a file of trusted certificates: OpenSSL's own, so that every process and library of a run uses it."""


@dataclass(frozen=True)
class Target:
    """The server under test.

    Raises:
        UsageError: ``base_url`` is not an http or https address.
    """

    base_url: str
    """An address like http://host:8000 or https://host/prefix; a /v1 at its end, which OpenAI clients want, is removed."""
    api_key: str = field(default="", repr=False)
    """Key that is sent as a bearer token."""
    named: str = ""
    """Host header of the requests, if it differs from the address: behind a relay, the address of the target."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.base_url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            usable = usable and not (parts.query or parts.fragment or parts.username)
            (parts.hostname or "").encode("idna")
        except ValueError:  # the port is no number, an IPv6 address lacks its bracket, or a part of the name is empty or too long
            usable = False
        plain = self.base_url.isascii() and self.base_url.isprintable() and " " not in self.base_url
        if not (usable and plain):
            raise UsageError("target", f"{self.base_url!r} is not like http://host:8000 or https://host/prefix")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("--api-key", "holds characters that cannot stand in a header")

    @property
    def tls(self) -> bool:
        return urlsplit(self.base_url).scheme == "https"

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.base_url).port or (443 if self.tls else 80)

    @property
    def root(self) -> str:
        """Return the address without a slash or /v1 at its end."""
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def prefix(self) -> str:
        return urlsplit(self.root).path

    @property
    def authority(self) -> str:
        """Return the Host header of the requests."""
        return self.named or urlsplit(self.base_url).netloc

    @property
    def headers(self) -> dict[str, str]:
        # A compressed or rewritten stream does not arrive in the pieces that were sent.
        own = {"User-Agent": "serve-app-loadtest", "Accept": "*/*", "Accept-Encoding": "identity"}
        return {**own, "Authorization": f"Bearer {self.api_key}"} if self.api_key else own


def trust(ca_file: Path | None) -> dict[str, str]:
    """Return the environment variables that make a run's processes trust the certificates in the file.

    Raises:
        UsageError: The file, or the file that the environment names, cannot be read or has no certificate.
    """
    named = str(ca_file) if ca_file else os.environ.get(CA_VARIABLE, "")
    if not named:
        return {}
    try:
        ssl.create_default_context(cafile=named)
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(
            "--ca-file" if ca_file else CA_VARIABLE, f"{named}: {exc.strerror or exc}; give certificates as PEM"
        ) from exc
    return {CA_VARIABLE: str(Path(named).absolute())}


def get_within(http: httpx.Client, url: str, seconds: float, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """Return the whole answer to a GET. ``seconds`` limits the whole answer; httpx's own timeouts begin again with each byte.

    Raises:
        httpx.HTTPError: There is no answer, the answer is too large, or it is not complete in time.
    """
    found: list[httpx.Response | Exception] = []

    def get() -> None:
        try:
            with http.stream("GET", url, headers=headers) as answer:
                found.append(_whole(answer, until))
        except Exception as exc:  # the root of this thread; the waiting thread raises it
            found.append(exc)

    until = time.monotonic() + seconds
    thread = threading.Thread(target=get, name=f"get {url}", daemon=True)  # httpx has no call to cancel a request
    thread.start()
    thread.join(seconds)
    answer = found[0] if found else httpx.ReadTimeout(f"no whole answer within {seconds:g} s")
    if isinstance(answer, Exception):
        raise answer
    return answer


def _whole(answer: httpx.Response, until: float) -> httpx.Response:
    """Return the answer with its body, read up to a limit: a page may have no end."""
    pieces, left = [], MAX_PAGE_BYTES
    for piece in answer.iter_bytes():
        pieces.append(piece)
        left -= len(piece)
        if left < 0 or time.monotonic() > until:
            raise httpx.ReadTimeout(f"the answer did not end in time, or within {MAX_PAGE_BYTES >> 20} MiB")
    kept = {name: value for name, value in answer.headers.items() if name not in ("content-encoding", "transfer-encoding")}
    return httpx.Response(answer.status_code, headers=kept, content=b"".join(pieces), request=answer.request)


def preflight(target: Target, model: str, named: Mapping[str, str] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the model to name in the requests, and the target's own description: server, version, models.

    Args:
        model: A model at /v1/models; empty: the first one there. A target without that list is assumed to serve it.
        named: Further models that requests name, by the scenario's key of each; they must be at /v1/models too.

    Raises:
        UsageError: The target cannot be used; the message has the way out.
    """
    verify = ssl.create_default_context() if target.tls else False
    # Like the load generator, this client ignores the environment's proxies.
    with httpx.Client(headers=target.headers, timeout=ANSWER_WITHIN_S, trust_env=False, verify=verify) as http:
        url = f"{target.root}/v1/models"
        try:
            answer = get_within(http, url, ANSWER_WITHIN_S)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as exc:  # the latter two come of a name that cannot be resolved
            hint = "is the server up, and the address right?"
            if "CERTIFICATE_VERIFY_FAILED" in str(exc):
                hint = f"give the file of its authority with --ca-file (or {CA_VARIABLE}), and the name that its certificate has"
            raise UsageError("target", f"{url}: {exc or type(exc).__name__}; {hint}") from exc
        served = _served(url, answer, believed=bool(model and target.api_key))
        model = model or next(iter(served or ()), "")
        asked = {**(named or {}), "model": model}
        info: dict[str, Any] = {"server": answer.headers.get("server", ""), "models": None if served is None else list(served)}
        if served is None:
            if not model:
                raise UsageError("model", f"{url} answers {answer.status_code}, so the model must be named")
            believed = ", ".join(map(repr, dict.fromkeys(asked.values())))
            info["note"] = f"{url} answers {answer.status_code}: model {believed} was not checked to be served"
        else:
            _check_all_are(served, asked, target)
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError):  # many servers lack this page
            said = get_within(http, f"{target.root}/version", ANSWER_WITHIN_S).raise_for_status().json()
            info["version"] = _text(said["version"])
            if "serve_app" in said:  # serve-app reports when its engines are simulated
                simulated = said.get("simulated", {})
                bases = [(served or {}).get(name, name) for name in asked.values()]
                info["simulated"] = "; ".join(dict.fromkeys(_text(simulated[base]) for base in bases if base in simulated))
        return model, info


def _text(said: Any) -> str:
    """Return a text from the target.

    Raises:
        ValueError: The text cannot be encoded.
    """
    if not is_writable(text := str(said)):
        raise ValueError(shown(text))
    return text


def _check_all_are(served: Mapping[str, str], asked: Mapping[str, str], target: Target) -> None:
    for where, name in asked.items():
        if name not in served:
            raise UsageError(where, f"{name!r} is not served at {target.root}; it serves {shown(', '.join(served), MAX_NAMES)}")


def _served(url: str, answer: httpx.Response, *, believed: bool) -> dict[str, str] | None:
    """Return the models' names, each with the name of its base model (its own, if it is no adapter); None: the target has no list.

    Args:
        believed: Whether both a model and a key are given: a key may be valid for answers but not for the list.
    """
    status, kind = answer.status_code, answer.headers.get("content-type", "").partition(";")[0]
    if status == 403 and believed:
        return None
    said = shown(error_message(answer.content))
    if status in (401, 403):
        raise UsageError("--api-key", f"{url} answers {status}: {said}; give the target's key")
    if 300 <= status < 400:
        raise UsageError(
            "target", f"{url} redirects to {shown(answer.headers.get('location', 'nowhere'))}; name the final address"
        )
    if kind == "text/html":
        raise UsageError("target", f"{url} answers {status} and HTML, not the OpenAI API: {shown(shorten(answer.content))}")
    if status in (404, 405, 501):
        return None
    if status != 200:
        raise UsageError("target", f"{url} answers {status}: {said}")
    try:
        listed = answer.json()
        models = listed if isinstance(listed, list) else listed["data"]
        served = {_text(model["id"]): _text(model.get("parent") or model["id"]) for model in models}
    except (ValueError, LookupError, TypeError):
        raise UsageError("target", f"{url} does not answer as the OpenAI API does: {shown(shorten(answer.content))}") from None
    if not served:
        raise UsageError("target", f"{url} lists no model yet; wait until the server is ready")
    return served
