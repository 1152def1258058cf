"""The web application works without a browser: Gradio's own client calls what the page's Send button calls."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from tests.ports import free_port
from tests.ui.fake_service import KEY, MODEL, FakeService, fake_service, ingress, listening, lost, member, way

gradio_client = pytest.importorskip("gradio_client", reason="Gradio is not installed: pip install 'serve-app[ui]'")


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeService]:
    with fake_service(num_words=3, pause_s=0.06) as fake:
        yield fake


@pytest.fixture(scope="module")
def site(fake: FakeService) -> Iterator[str]:
    from serve_app.ui.app import web_app

    with listening(web_app(fake.url)) as url:
        yield url


def sent(site: str, *, model: str = MODEL, n: int = 1, max_tokens: int = 64, prompt: str = "Hi") -> list[str]:
    """Return the states of all outputs of the page, as text, for one prompt."""
    return [str(outputs) for outputs in said(site, None, model=model, n=n, max_tokens=max_tokens, prompt=prompt)]


def said(
    site: str, chat: Any, *, model: str = MODEL, n: int = 1, max_tokens: int = 64, prompt: str = "Hi"
) -> list[tuple[Any, ...]]:
    """Return the states of all outputs of the page for one prompt; the first output is the chat after it."""
    controls: list[Any] = [chat, "", "chat", model, "Be brief.", 0.5, 1.0, max_tokens, n, 7, "", prompt]
    return list(gradio_client.Client(site, verbose=False).submit(*controls, api_name="/send"))


def test_a_prompt_is_asked_with_the_controls_and_answered_in_several_states(site: str, fake: FakeService) -> None:
    states = sent(site, n=2)
    assert fake.asked[-1].items() >= {"model": MODEL, "n": 2, "seed": 7, "max_tokens": 64, "temperature": 0.5}.items()
    assert [message["role"] for message in fake.asked[-1]["messages"]] == ["system", "user"]
    assert any("word0.0" in state and "word0.2" not in state for state in states)
    assert any("word1.2" in state for state in states)


@pytest.mark.parametrize(
    ("controls", "said"),
    [
        ({"model": "nobody"}, "That is not served here."),
        ({"max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        ({"prompt": " "}, "Type a prompt first."),
    ],
)
def test_what_cannot_be_asked_is_said_on_the_page(site: str, controls: dict[str, Any], said: str) -> None:
    assert said in sent(site, **controls)[-1]


def test_both_pages_and_the_probe_are_there_and_ask_no_other_host(site: str) -> None:
    assert httpx.get(f"{site}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{site}/favicon.ico").headers["content-type"].startswith("image/svg")
    for path in ("/", "/fleet"):
        page = httpx.get(f"{site}{path}")
        assert "fonts.googleapis.com/css" not in page.text
        policy = page.headers["content-security-policy"].split("; ")
        assert {"img-src 'self' data: blob:", "media-src 'self' data: blob:", "form-action 'none'"} <= set(policy)


SERVES = """import signal
from serve_app.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that SIGINT is ignored
main()
"""


def test_ctrl_c_ends_the_pages_with_one_line() -> None:
    port, url = free_port(), "http://127.0.0.1:9"
    command = [sys.executable, "-c", SERVES, "ui", "--url", url, f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pages:
        try:
            assert pages.stdout is not None
            assert pages.stdout.readline().startswith("chat page ")
            with httpx.Client(transport=httpx.HTTPTransport(retries=8)) as http:  # until it listens
                assert http.get(f"http://127.0.0.1:{port}/healthz").is_success
            pages.send_signal(signal.SIGINT)
            said = pages.stdout.read()
        finally:
            pages.kill()
    assert (pages.returncode, said) == (130, f"\nthe pages ended by Ctrl-C; {url} continues without them\n")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/gradio_api/upload"),
        ("POST", "/gradio_api/process_recording"),
        ("POST", "/gradio_api/component_server"),
        ("GET", "/gradio_api/deep_link?session_hash=a"),
        ("GET", "/gradio_api/file=https://example.com/?asked=secret"),
        ("GET", "/gradio_api/proxy=https://example.hf.space/"),
        ("GET", "/monitoring/summary"),
    ],
)
def test_what_gradio_serves_beside_the_pages_is_not_there(site: str, method: str, path: str) -> None:
    files = {"files": ("a.bin", b"x")} if method == "POST" else None
    refused = httpx.request(method, f"{site}{path}", files=files)
    assert (refused.status_code, refused.text) == (404, "The pages have no such path.\n")


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_an_image_of_an_answer_opens_no_stream(site: str, kind: str) -> None:
    """Nor a sound or a video: six streams would use up the connections that a browser makes to the pages."""
    asked = f"{site}/gradio_api/heartbeat/1"
    assert httpx.get(asked, headers={"sec-fetch-dest": kind}).status_code == 404
    with httpx.stream("GET", asked, headers={"sec-fetch-dest": "empty"}) as stream:
        assert stream.status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://other.example"}, 403),
        ({"origin": "https://other.example", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "null", "sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://pages.example", "host": "pages.example:8011"}, 403),
        ({"origin": "http://pages.example:8011", "host": "pages.example:8011"}, 200),
        ({"origin": "https://pages.example", "host": "10.0.0.1", "x-forwarded-host": "pages.example"}, 200),
        ({"origin": "https://pages.example", "host": "10.0.0.1", "sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://pages.example", "host": "pages.example:80"}, 200),
        ({"origin": "https://pages.example", "host": "10.0.0.1", "x-forwarded-host": "pages.example:443, inner.example"}, 200),
        ({"origin": "https://pages.example", "host": "pages.example:80"}, 403),
        ({"origin": "null", "host": ""}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 200),  # a link
    ],
)
def test_a_page_of_another_site_is_refused(site: str, headers: dict[str, str], status: int) -> None:
    assert httpx.get(f"{site}/config", headers=headers).status_code == status


def test_a_page_of_another_site_makes_the_service_do_nothing(site: str, fake: FakeService) -> None:
    before = len(fake.asked)
    send = next(d["id"] for d in httpx.get(f"{site}/config").json()["dependencies"] if d["api_name"] == "send")
    controls: list[Any] = [None, "", "chat", MODEL, "", 0.5, 1.0, 8, 1, 7, "", "Hi"]
    join = {"data": controls, "fn_index": send, "session_hash": "other"}
    refused = httpx.post(f"{site}/gradio_api/queue/join", json=join, headers={"origin": "https://other.example"})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)
    assert len(fake.asked) == before


def test_a_thought_is_shown_and_is_no_part_of_the_conversation(
    site: str, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "thinks", True)
    states = said(site, None)
    assert any("thought0" in str(state) for state in states)
    said(site, states[-1][0], prompt="And then?")
    assert [message["content"] for message in fake.asked[-1]["messages"][1:]] == ["Hi", "word0.0 word0.1 word0.2", "And then?"]


def test_a_failure_of_the_page_itself_is_said_and_send_comes_back(
    site: str, fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "line", '{"choices": [{"index": 0, "delta": {"content": [1]}}]}')
    assert "The page failed; its log has the cause." in sent(site)[-1]
    monkeypatch.setattr(fake, "line", "")
    assert "The page failed" not in sent(site)[-1]


def looked(fake: FakeService, before: Any, happenings: tuple[Any, ...] = ()) -> list[Any]:
    """Return what the fleet page shows and remembers after one look, with its field for a key hidden, whose value is then None."""
    import gradio as gr

    from serve_app.ui.api import Service
    from serve_app.ui.fleet_page import FleetPage

    with gr.Blocks():
        page = FleetPage(Service(fake.url))
    return asyncio.run(page.look(None, before, list(happenings)))


def killed(fake: FakeService, host: str, *, key: str | None = None, is_demo: bool = True) -> str:
    """Return what the fleet page says after a click, by a browser that asked ``host``. No process is below that of its killer."""
    import gradio as gr

    from serve_app.ui.api import Service
    from serve_app.ui.fleet_page import FleetPage
    from serve_app.ui.killing import Killer

    with gr.Blocks():
        page = FleetPage(Service(fake.url), Killer(psutil.Process()) if is_demo else None)
    return asyncio.run(page.kill(key, SimpleNamespace(headers={"host": host})))


def test_only_a_demo_offers_to_kill_an_engine(site: str, fake: FakeService) -> None:
    buttons = [c["props"] for c in httpx.get(f"{site}/config").json()["components"] if c["props"].get("elem_id") == "kill"]
    assert buttons == []
    assert "only by a page that was opened at 127.0.0.1" in killed(fake, "127.0.0.1:8011", is_demo=False)


def test_an_engine_is_killed_only_from_this_machine_and_with_a_key(fake: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "only by a page that was opened at 127.0.0.1" in killed(fake, "other.example:8011")
    assert "No replica is ready" in killed(fake, "127.0.0.1:8011")
    monkeypatch.setattr(fake, "asks_for_key", True)
    assert "The API key is missing or wrong" in killed(fake, "127.0.0.1:8011")
    assert "No replica is ready" in killed(fake, "127.0.0.1:8011", key=KEY)
    monkeypatch.setattr(fake, "report", {"time": 1.0})
    assert "did not answer with a fleet" in killed(fake, "127.0.0.1:8011", key=KEY)


def test_an_older_report_of_another_ingress_tells_of_nothing(fake: FakeService) -> None:
    before = {"time": 1000.5, "members": [ingress(), member("a"), member("b")], "decisions": []}
    _, problem, *_, remembered, happenings = looked(fake, before)
    assert (problem["value"], remembered, happenings) == ("", before, [])
    *_, happenings = looked(fake, before | {"time": 999.5})
    assert [happening.text for happening in happenings] == [f"Replica of {MODEL} b is gone"]


def test_the_page_says_a_loss_once_though_an_ingress_between_did_not_know_it(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "report", fake.report | {"lost": [lost("b", time=999.0)]})
    *_, said = looked(fake, None)
    assert [happening.text for happening in said] == [f"Replica of {MODEL} b is lost: its engine died"]
    between = {"time": 999.5, "members": [ingress(), member("a")], "decisions": []}
    *_, again = looked(fake, between, tuple(said))
    assert again == said


def test_a_service_that_refuses_leaves_the_fleet_of_before_with_its_time(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "asks_for_key", True)
    before = {"time": 990.0, "members": [ingress()], "decisions": []}
    _, problem, *_, remembered, _ = looked(fake, before)
    assert "(401) The fleet below is that of 00:16:30 UTC.</div>" in problem["value"]
    assert remembered is before
    _, problem, *_ = looked(fake, None)
    assert "below" not in problem["value"]


def test_the_page_shows_the_ways_of_requests_where_the_service_has_them(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "ways", {"time": 1000.0, "moved": [way("mine", ("a", "it died"), ("b", ""))], "others": []})
    _, problem, drawn, *_ = looked(fake, None)
    assert (problem["value"], "moved: it died" in drawn) == ("", True)
    monkeypatch.setattr(fake, "ways", None)
    _, problem, drawn, *_ = looked(fake, None)
    assert (problem["value"], "Ways of requests" in drawn, "answers resumed" in drawn) == ("", False, True)
    monkeypatch.setattr(fake, "ways", {})
    _, problem, *_ = looked(fake, None)
    assert "did not answer with a fleet" in problem["value"]


def test_the_page_asks_for_a_key_once_the_service_does(fake: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "visible" not in looked(fake, None)[0]
    monkeypatch.setattr(fake, "asks_for_key", True)
    assert looked(fake, None)[0]["visible"] is True


def test_a_service_whose_clock_was_set_back_is_followed(fake: FakeService) -> None:
    before = {"time": 4600.0, "members": [ingress(), member("a"), member("b")], "decisions": []}
    *_, remembered, happenings = looked(fake, before)
    assert (remembered, [happening.text for happening in happenings]) == (fake.report, [f"Replica of {MODEL} b is gone"])


@pytest.mark.parametrize("report", [{}, [], {"time": 1.0, "members": [1], "decisions": []}, {"time": 1.0, "members": [{}]}])
def test_a_report_of_another_form_is_said(fake: FakeService, monkeypatch: pytest.MonkeyPatch, report: Any) -> None:
    monkeypatch.setattr(fake, "report", report)
    _, problem, *_, remembered, _ = looked(fake, None)
    assert "did not answer with a fleet" in problem["value"]
    assert remembered is None
