"""The web application without a browser: Gradio's own client calls what the page's Send button calls."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.ui.fake_service import MODEL, FakeService, fake_service, listening

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
    client = gradio_client.Client(site, verbose=False)
    controls: list[Any] = ["", "chat", model, "Be brief.", 0.5, 1.0, max_tokens, n, 7, "", prompt]
    job = client.submit(*controls, api_name="/send")
    return [str(outputs) for outputs in job]


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
    assert httpx.get(f"{site}/healthz").json()["status"] == "ok"
    for path in ("/", "/fleet"):
        page = httpx.get(f"{site}{path}").text
        assert "fonts.googleapis.com/css" not in page
