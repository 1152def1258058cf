"""Media that requests name by URL: no host without its name in the configuration, no address inside of the cluster, no redirect."""

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY

from serve_app.config import parse_settings
from serve_app.engine_args import INGRESS_ENVIRONMENT, frontend_engine_args
from serve_app.ingress.front_end.media import AddressRefused, PublicResolver, check_addresses, refuse_private
from tests.doubles.fleet import in_loop


class Inside:
    """A server inside of the cluster, such as a cloud's metadata service, and the requests that reached it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        inside = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                inside.asked.append(self.path)
                self.send_response(302 if self.path == "/redirect" else 200)
                self.send_header("location", "/secret")
                self.end_headers()
                self.wfile.write(b"no image")

            def log_message(self, *_: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, host: str, path: str = "/secret") -> str:
        return f"http://{host}:{self.server.server_port}{path}"


@pytest.fixture
def inside() -> Iterator[Inside]:
    made = Inside()
    yield made
    made.server.shutdown()
    made.server.server_close()


async def read(url: str, **media: Any) -> Exception:
    """Read an image as the front end of a model with these settings does; return the error, which there always is."""
    check_addresses()
    model = parse_settings({"models": {"vlm": {"model": "/models/vlm", "media": media}}}).models["vlm"]
    domains = frontend_engine_args(model, "/models/vlm")["allowed_media_domains"]
    connector: Any = MEDIA_CONNECTOR_REGISTRY.load("http", allowed_media_domains=domains)
    with pytest.raises(Exception) as refused:  # noqa: PT011  # vLLM wraps errors of the network in many types
        await connector.fetch_image_async(url)
    return refused.value


def causes(error: BaseException | None) -> list[type]:
    found: list[type] = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__ or error.__context__
    return found


@in_loop
async def test_by_default_no_url_is_fetched_and_the_refusal_names_the_setting(inside: Inside) -> None:
    refused = await read(inside.url("127.0.0.1"))
    assert "none: models.NAME.media.domains is empty" in str(refused)
    assert inside.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@in_loop
async def test_a_configured_name_with_a_private_address_is_refused(host: str, inside: Inside) -> None:
    refused = await read(inside.url(host), domains=[host])
    assert AddressRefused in causes(refused)
    assert inside.asked == []


@in_loop
async def test_private_addresses_can_be_allowed_and_redirects_are_never_followed(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", INGRESS_ENVIRONMENT["VLLM_MEDIA_URL_ALLOW_REDIRECTS"])
    await read(inside.url("127.0.0.1", "/redirect"), domains=["127.0.0.1"], private_addresses=True)
    assert inside.asked == ["/redirect"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "2002:a9fe:a9fe::1", "::"),
    ],
)
def test_addresses_inside_are_refused(address: str) -> None:
    with pytest.raises(AddressRefused):
        refuse_private(address)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"])
def test_public_addresses_are_not(address: str) -> None:
    refuse_private(address)


@in_loop
async def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    class Changing:
        async def resolve(self, host: str, port: int = 0, family: Any = None) -> list[dict[str, Any]]:
            return [{"host": "93.184.216.34"}, {"host": "169.254.169.254"}]

    resolver: Any = PublicResolver(Changing())  # type: ignore[arg-type]
    with pytest.raises(AddressRefused):
        await resolver.resolve("images.example.com")
