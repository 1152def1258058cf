"""The chat page asks and shows, without a browser and without Gradio: against a fake service over HTTP."""

import asyncio
import io
import json
import re
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from serve_app.cli import ui as cli
from serve_app.config import parse_settings
from serve_app.errors import ConfigError
from serve_app.ui.answering import Answering
from serve_app.ui.api import Service, ServiceProblem, lines_of
from serve_app.ui.chat import Chat
from serve_app.ui.preset import Preset
from tests.ui.fake_service import KEY, MODEL, FakeService, fake_service

ROOT = Path(__file__).parents[2]


def answered(fake: FakeService, *, key: str = "", stop_after: int | None = None, **controls: Any) -> tuple[list[list[str]], str]:
    """Return the states of the answer that the page would show, and the last line of figures."""

    async def collect() -> tuple[list[list[str]], str]:
        service = Service(fake.url)
        answering = Answering(service)
        shown: list[list[str]] = []
        figures = ""
        try:
            async for answer in answering.answer("page", Preset(model=MODEL, prompt="Hi", **controls), [], key):
                shown.append(list(answer.texts))
                figures = answer.figures(now=time.monotonic())
                if stop_after is not None and len(shown) > stop_after:
                    answering.stop("page")
        finally:
            await service.close()
        return shown, figures

    return asyncio.run(collect())


def test_a_stream_is_shown_as_it_comes_with_each_choice_apart() -> None:
    with fake_service(pause_s=0.06, num_words=4) as fake:
        shown, figures = answered(fake, n=2)
    assert shown[0] == ["", ""]
    assert shown[-1] == ["word0.0 word0.1 word0.2 word0.3", "word1.0 word1.1 word1.2 word1.3"]
    assert any(0 < len(first) < len(shown[-1][0]) for first, _ in shown)
    assert figures.startswith("8 tokens · TTFT ")
    assert "tokens/s" in figures


def test_all_that_has_come_is_shown_though_nothing_follows() -> None:
    async def shown_before_silence(fake: FakeService) -> None:
        service = Service(fake.url)
        try:
            async with aclosing(Answering(service).answer("page", Preset(model=MODEL, prompt="Hi"), [], "")) as answers:
                async for answer in answers:
                    if answer.texts == ["word0.0 word0.1"]:
                        return
        finally:
            await service.close()

    with fake_service(holds=True) as fake:
        asyncio.run(asyncio.wait_for(shown_before_silence(fake), 60))


def test_a_stop_closes_the_connection_and_keeps_what_had_come() -> None:
    with fake_service(holds=True) as fake:
        shown, figures = answered(fake, stop_after=1)
        for _ in range(500):
            if fake.running == 0:
                break
            time.sleep(0.01)
        assert fake.running == 0
    assert shown[-1][0].startswith("word0.0")
    assert figures.startswith("≈ ")


@pytest.mark.parametrize(
    ("options", "controls", "said"),
    [
        (
            {"asks_for_key": True},
            {"key": "wrong"},
            "The API key is missing or wrong: type it into the field API key. (401)",
        ),
        ({}, {"model": "other"}, "That is not served here. the model 'other' does not exist. (404)"),
        (
            {"busy": True},
            {},
            "The service has no room for the request now. no replica of fake-model has room. (503) Try again in 7 s.",
        ),
        ({"breaks": True}, {}, "The service failed. the replica was lost. (502)"),
        ({"line": '{"error": {"message": "slower", "code": "rate_limit"}}'}, {}, "The service failed. slower. (500)"),
    ],
)
def test_each_refusal_is_a_sentence(options: dict[str, Any], controls: dict[str, Any], said: str) -> None:
    async def ask(fake: FakeService) -> None:
        service = Service(fake.url)
        preset = Preset(model=controls.get("model", MODEL), prompt="Hi")
        async for _ in Answering(service).answer("page", preset, [], controls.get("key", "")):
            pass

    with fake_service(**options) as fake, pytest.raises(ServiceProblem) as refused:
        asyncio.run(ask(fake))
    assert str(refused.value) == said


@pytest.mark.parametrize("line", ["[1]", "{", '{"error": "text"}', '{"choices": [{"text": "x"}]}', '{"choices": [3]}'])
def test_a_stream_of_another_form_is_said(line: str) -> None:
    with fake_service(line=line) as fake, pytest.raises(ServiceProblem, match="did not answer as an OpenAI-style API does"):
        answered(fake)


@pytest.mark.parametrize("listing", [[], [1], {}, {"data": 3}, {"data": [{"name": "x"}]}])
def test_a_listing_of_another_form_is_said(listing: Any) -> None:
    with fake_service(listing=listing) as fake, pytest.raises(ServiceProblem, match="did not answer as an OpenAI-style API does"):
        asyncio.run(Service(fake.url).models(""))


def test_a_choice_that_nobody_asked_for_is_left_out() -> None:
    with fake_service(num_words=2, line='{"choices": [{"index": 1, "delta": {"content": "more"}}]}') as fake:
        shown, _ = answered(fake)
    assert shown[-1] == ["word0.0 word0.1"]


@pytest.mark.parametrize("between", ["\u2028", "\u2029", "\u0085", "é", "🙂"])
def test_characters_that_unicode_counts_as_line_ends_stay_in_the_text(between: str) -> None:
    event = {"choices": [{"index": 0, "delta": {"content": f" a{between}b"}}]}
    with fake_service(num_words=2, line=json.dumps(event, ensure_ascii=False)) as fake:
        shown, _ = answered(fake)
    assert shown[-1] == [f"word0.0 word0.1 a{between}b"]


@pytest.mark.parametrize(
    ("written", "shown_as"), [(r"a\ud83d", "a\ufffd"), (r"a\ud83d\ude00", "a\U0001f600"), (r"\\ud83d", r"\ud83d")]
)
def test_half_a_surrogate_pair_which_has_no_utf_8_is_shown_as_a_replacement(written: str, shown_as: str) -> None:
    with fake_service(num_words=2, line=f'{{"choices": [{{"index": 0, "delta": {{"content": "{written}"}}}}]}}') as fake:
        shown, _ = answered(fake)
    assert shown[-1] == [f"word0.0 word0.1{shown_as}"]


def test_any_chunking_of_a_stream_gives_the_same_lines() -> None:
    async def lines(chunks: list[bytes]) -> list[str]:
        async def pieces() -> AsyncIterator[bytes]:
            for chunk in chunks:
                yield chunk

        return [line async for line in lines_of(pieces())]

    wire = "data: é\u2028x\r\n\r\ndata: y\n\n: waiting\nrest".encode()
    for cut in (1, 2, 3, 7, len(wire)):
        chunks = [wire[i : i + cut] for i in range(0, len(wire), cut)]
        assert asyncio.run(lines(chunks)) == ["data: é\u2028x", "", "data: y", "", ": waiting", "rest"]


def test_an_answer_that_is_left_after_its_first_state_leaves_nothing_behind() -> None:
    async def left(fake: FakeService) -> dict[str, asyncio.Task[None]]:
        answering = Answering(Service(fake.url))
        answer = answering.answer("page", Preset(model=MODEL, prompt="Hi"), [], "")
        await anext(answer)
        await answer.aclose()
        return answering._readers

    with fake_service() as fake:
        assert asyncio.run(left(fake)) == {}


@pytest.mark.parametrize("url", ["http://", "http://host:port", "ftp://host"])
def test_a_url_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--url: .*for example http://127\.0\.0\.1:8010"):
        cli.ui(url, "127.0.0.1", 8011, ends_with_input=False)


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="--url: holds a user name or a password") as refused:
        cli.ui("http://somebody:secret@host", "127.0.0.1", 8011, ends_with_input=False)
    assert "secret" not in str(refused.value)


def test_pages_that_end_at_once_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "is_installed", lambda: True)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = io.StringIO()
    settings = parse_settings({"models": {"a": {"model": "some/model"}}, "ui": {"port": port}})
    with cli.pages(settings, Console(file=out, width=200)):
        for _ in range(500):
            if out.getvalue().endswith("\n"):
                break
            time.sleep(0.01)
    assert out.getvalue() == "no chat page: its process ended with status 1; the service continues without it\n"


def test_a_service_that_is_away_is_named() -> None:
    with fake_service() as fake:
        away = fake.url
    with pytest.raises(ServiceProblem, match=f"Nothing answers at {away}"):
        asyncio.run(Service(away).models(""))


def test_the_key_is_sent_and_never_in_a_link() -> None:
    with fake_service(asks_for_key=True) as fake:
        assert asyncio.run(Service(fake.url).models(KEY)) == [MODEL]
    assert "key" not in Preset.model_fields


def test_a_link_sets_what_it_can_and_names_what_it_cannot() -> None:
    preset, problems = Preset.from_link({"temperature": "9", "n": "2", "model": "m", "prompt": "a b", "__theme": "dark"})
    assert (preset.n, preset.model, preset.prompt, preset.temperature) == (2, "m", "a b", Preset().temperature)
    assert problems == ["The link's temperature=9 is not used: input should be less than or equal to 2."]
    assert preset.link() == "?model=m&prompt=a+b&n=2"
    assert Preset.from_link(dict(httpx.QueryParams(preset.link()[1:]))) == (preset, [])


def test_the_request_holds_the_conversation_and_a_completion_only_the_prompt() -> None:
    history = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    preset = Preset(model="m", system="s", prompt="3", seed=5, stop="END")
    path, body = preset.request(history)
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "system", "content": "s"}, *history, {"role": "user", "content": "3"}]
    assert (body["seed"], body["stop"]) == (5, ["END"])
    path, body = preset.model_copy(update={"mode": "completion"}).request(history)
    assert (path, body["prompt"]) == ("/v1/completions", "3")
    assert "messages" not in body


@pytest.mark.parametrize(
    ("controls", "said"),
    [
        ({}, ""),
        ({"n": 2}, ""),
        ({"temperature": 0}, ""),
        ({"prompt": " "}, "Type a prompt first."),
        (
            {"n": 2, "temperature": 0},
            "At temperature 0 all answers would be the same: set a temperature above 0, or ask for one answer.",
        ),
    ],
)
def test_what_the_service_would_refuse_is_said_before_it_is_sent(controls: dict[str, Any], said: str) -> None:
    assert Preset(**({"prompt": "Hi"} | controls)).refusal() == said


def test_a_chat_is_what_the_browser_sends_back() -> None:
    first = Chat().answered("Hello\n there", ["a", "b"])
    assert (first.title, first.turns, first.choices) == ("Hello there", [("Hello\n there", "a")], ["a", "b"])
    assert Chat.read(json.loads(json.dumps(first.model_dump()))) == first
    chosen = first.with_choice(1)
    assert (chosen.id, chosen.turns) == (first.id, [("Hello\n there", "b")])
    second = chosen.answered("More", ["c"])
    assert [message["content"] for message in second.messages()] == ["Hello\n there", "b", "More", "c"]
    assert second.before(1).turns == chosen.turns
    assert second.title == "Hello there"
    assert second.without(1) == second.before(1)
    assert (second.without(0).turns, second.without(0).title, second.without(0).id) == ([("More", "c")], "More", first.id)
    assert first.without(0) == Chat(id=first.id)


@pytest.mark.parametrize("value", [None, [], "x", {"turns": [["only a prompt"]]}, {"turns": [[1, 2]]}, {"title": None}])
def test_a_stored_chat_of_another_form_is_an_empty_one(value: Any) -> None:
    assert Chat.read(value) == Chat()


@pytest.mark.parametrize(
    ("file", "pattern", "colour_of", "wanted"),
    [
        ("serve_app/ui/mark.svg", r'fill="(#\w{6})"', "report", "--brand: {}"),
        ("serve_app/ui/mark.svg", r'fill="(#\w{6})"', "site", "--md-primary-fg-color: {}"),
        ("serve_app/ui/page.css", r"\.state {[^}]*background: (#\w{6})", "report", "--pass: {}"),
        ("serve_app/ui/page.css", r"\.state\.draining {[^}]*background: (#\w{6})", "report", "--undecided: {}"),
        ("serve_app/ui/page.css", r"\.state\.lost {[^}]*background: (#\w{6})", "report", "--fail: {}"),
        ("loadtest/report/plots.py", r'INK, .* = "(#\w{6})"', "report", "--ink: {}"),
        ("loadtest/report/plots.py", r'INK, .* = "#\w{6}", "(#\w{6})"', "report", "--muted: {}"),
    ],
)
def test_pages_report_and_site_have_one_palette(file: str, pattern: str, colour_of: str, wanted: str) -> None:
    """A colour of ``file`` stands in the light style of the report or of the documentation's site as well."""
    found = re.search(pattern, (ROOT / file).read_text())
    assert found is not None
    style = {"report": "loadtest/report/report.html.jinja", "site": "docs/site.css"}[colour_of]
    assert f"{wanted.format(found[1])};" in (ROOT / style).read_text()


def test_the_report_has_the_products_mark() -> None:
    mark = re.findall(r"<(?:rect|path).*/>", (ROOT / "serve_app/ui/mark.svg").read_text())
    assert mark
    report = (ROOT / "loadtest/report/report.html.jinja").read_text()
    assert all(shape in report for shape in mark)
