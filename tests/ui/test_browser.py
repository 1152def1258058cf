"""The pages run here in a headless Chromium, in front of a fake service whose answers the test steers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.ui.browser import (
    answer,
    answered,
    ask,
    assert_inside,
    chromium,
    messages,
    needs_chromium,
    open_chat,
    problem,
    wait_for_answer,
    wait_for_titles,
    wait_until_done,
)
from tests.ui.fake_service import MODEL, FakeService, fake_service, ingress, listening, lost, member, starting

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeService]:
    with fake_service() as fake:
        yield fake


@pytest.fixture(scope="module")
def site(fake: FakeService) -> Iterator[str]:
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'serve-app[ui]'")
    from serve_app.ui.app import web_app

    with listening(web_app(fake.url)) as url:
        yield url


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with chromium() as page:
        yield page


@pytest.fixture(autouse=True)
def _as_new(fake: FakeService) -> Iterator[None]:
    yield
    fake.holds = fake.busy = fake.asks_for_key = fake.breaks = False
    fake.line = ""


def markup(text: str) -> str:
    """Return the event whose text is a paragraph of ``text``, which may be HTML."""
    return json.dumps({"choices": [{"index": 0, "delta": {"content": f"\n\n{text}\n\n"}}]})


def asked_for(fake: FakeService) -> list[str]:
    """Return the messages of the last request."""
    return [message["content"] for message in fake.asked[-1]["messages"]]


def forget(page: Any, site: str) -> None:
    """Empty the browser's storage, and open the chat page."""
    page.goto(f"{site}/healthz")
    page.evaluate("() => localStorage.clear()")
    open_chat(page, site, MODEL)


ANSWER = "word0.0 word0.1 word0.2 word0.3 word0.4"


def test_the_first_words_are_there_before_the_last_and_escape_ends_the_answer(page: Any, site: str, fake: FakeService) -> None:
    fake.holds = True
    open_chat(page, site, MODEL)
    ask(page, "Hi")
    wait_for_answer(page, "word0.0 word0.1")
    assert fake.running == 1
    assert page.is_disabled("#clear")
    page.keyboard.press("Escape")
    wait_until_done(page)
    while fake.running:
        page.wait_for_timeout(10)
    assert answer(page) == "word0.0 word0.1"
    assert page.is_enabled("#clear")
    assert "TTFT" in page.inner_text("#figures")


def test_a_link_sets_the_controls_and_two_answers_stand_side_by_side(page: Any, site: str) -> None:
    open_chat(page, f"{site}/?n=2&temperature=0.5&prompt=Hello", MODEL)
    assert page.input_value("#prompt textarea") == "Hello"
    page.click("#send")
    wait_for_answer(page, "word0.4", 0)
    wait_for_answer(page, "word1.4", 1)
    wait_until_done(page)
    assert "10 tokens" in page.inner_text("#figures")
    page.click("#keep-1")
    wait_for_answer(page, "word1.4", 0)
    page.wait_for_selector("#answer-1", state="hidden")


def test_the_next_prompt_goes_on_with_the_conversation(page: Any, site: str, fake: FakeService) -> None:
    open_chat(page, site, MODEL)
    ask(page, "One")
    wait_for_answer(page, "word0.4")
    wait_until_done(page)
    ask(page, "Two")
    page.wait_for_function("() => document.getElementById('answer-0').innerText.split('word0.4').length === 3")
    said = [(m["role"], m["content"]) for m in fake.asked[-1]["messages"]]
    assert said == [("user", "One"), ("assistant", "word0.0 word0.1 word0.2 word0.3 word0.4"), ("user", "Two")]


def test_refusals_and_failures_are_shown_in_words(page: Any, site: str, fake: FakeService) -> None:
    open_chat(page, site, MODEL)
    assert not page.is_visible("#key")
    fake.busy = True
    ask(page, "Hi")
    assert "no room" in problem(page)
    assert "Try again in 7 s" in problem(page)
    assert page.input_value("#prompt textarea") == "Hi"
    assert messages(page) == []
    assert_inside(page, ["#send", "#problem"])
    fake.busy = False
    fake.asks_for_key = True
    open_chat_without_key(page, site)
    assert "API key is missing or wrong" in problem(page)
    page.fill("#key input", "right-key")
    page.press("#key input", "Enter")
    page.wait_for_function("name => document.querySelector('#model input')?.value === name", arg=MODEL)
    page.wait_for_selector("#key", state="hidden")
    answered(page, "With the key")
    page.goto(f"{site}/?model=nobody&prompt=Hi")
    page.wait_for_function("() => document.querySelector('#model input')?.value === 'nobody'")
    fake.asks_for_key = False
    page.click("#send")
    page.wait_for_function("() => document.querySelector('#problem [role=alert]')?.innerText.includes('not served here')")


def open_chat_without_key(page: Any, site: str) -> None:
    page.goto(site)
    page.wait_for_selector("#problem [role=alert]")


def test_several_answers_at_temperature_0_are_not_asked_for(page: Any, site: str, fake: FakeService) -> None:
    before = len(fake.asked)
    open_chat(page, f"{site}/?temperature=0&n=2&prompt=Hi", MODEL)
    page.click("#send")
    assert "set a temperature above 0, or ask for one answer" in problem(page)
    assert page.input_value("#prompt textarea") == "Hi"
    assert len(fake.asked) == before


def test_chats_are_listed_reopened_continued_and_deleted(page: Any, site: str, fake: FakeService) -> None:
    forget(page, site)
    answered(page, "First")
    wait_for_titles(page, ["First"])
    page.keyboard.press("Control+Shift+O")
    page.wait_for_function("() => !document.getElementById('answer-0').innerText.includes('First')")
    answered(page, "Second")
    wait_for_titles(page, ["Second", "First"])
    open_chat(page, site, MODEL)
    page.click("#chats label >> text=First")
    wait_for_answer(page, "word0.4")
    assert messages(page) == ["First", ANSWER]
    answered(page, "More")
    assert asked_for(fake) == ["First", ANSWER, "More"]
    wait_for_titles(page, ["First", "Second"])
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    wait_for_titles(page, ["Second"])
    page.wait_for_function("() => !document.getElementById('answer-0').innerText.includes('First')")


def test_two_tabs_keep_their_chats_beside_each_other(page: Any, site: str) -> None:
    forget(page, site)
    other = page.context.new_page()
    try:
        open_chat(other, site, MODEL)
        answered(page, "Here")
        answered(other, "There")
        wait_for_titles(other, ["There", "Here"])
    finally:
        other.close()


FULL = """maxChats => {
  const chats = ["a", "b", "c"].map((id) => ({ id, title: id, turns: [["q", "r"]], choices: [] }));
  localStorage.setItem("serve-app-chats", JSON.stringify(chats));
  const setItem = Storage.prototype.setItem;
  Storage.prototype.setItem = function (key, value) {
    if (JSON.parse(value).length > maxChats) throw new DOMException("full", "QuotaExceededError");
    setItem.call(this, key, value);
  };
}"""


@pytest.mark.parametrize(("room", "titles"), [(2, ["New", "a"]), (1, ["a", "b", "c"])])
def test_a_full_storage_loses_up_to_half_of_the_chats(page: Any, site: str, room: int, titles: list[str]) -> None:
    forget(page, site)
    page.evaluate(FULL, room)
    answered(page, "New")
    wait_for_titles(page, titles)
    assert (page.inner_text("#notice") == "This browser does not store the chat.") is ("New" not in titles)


def test_retry_edit_and_undo(page: Any, site: str, fake: FakeService) -> None:
    open_chat(page, site, MODEL)
    answered(page, "One")
    answered(page, "Two")
    asked = len(fake.asked)
    page.click("#answer-0 button[title=Retry]")
    while len(fake.asked) == asked:
        page.wait_for_timeout(10)
    wait_until_done(page)
    assert asked_for(fake) == ["One", ANSWER, "Two"]
    page.click("#answer-0 button[title=Edit] >> nth=0")
    page.fill("#answer-0 textarea", "Uno")
    page.click("#answer-0 button[title=Submit]")
    page.wait_for_function("() => !document.getElementById('answer-0').innerText.includes('Two')")
    wait_until_done(page)
    assert asked_for(fake) == ["Uno"]
    assert messages(page) == ["Uno", ANSWER]
    page.click("#answer-0 button[title=Undo]")
    page.wait_for_function("() => document.querySelector('#prompt textarea').value === 'Uno'")
    assert messages(page) == []


def test_a_failed_retry_leaves_the_answer_of_before_and_the_next_prompt(page: Any, site: str, fake: FakeService) -> None:
    open_chat(page, site, MODEL)
    answered(page, "One")
    page.fill("#prompt textarea", "Two")
    fake.busy = True
    page.click("#answer-0 button[title=Retry]")
    assert "no room" in problem(page)
    wait_until_done(page)
    assert messages(page) == ["One", ANSWER]
    assert page.input_value("#prompt textarea") == "Two"


@pytest.mark.parametrize(("typed", "left"), [("Two", "Two"), ("", "Uno")])
def test_a_failed_edit_is_given_back_if_nothing_else_was_typed(
    page: Any, site: str, fake: FakeService, typed: str, left: str
) -> None:
    open_chat(page, site, MODEL)
    answered(page, "One")
    page.fill("#prompt textarea", typed)
    fake.busy = True
    page.click("#answer-0 button[title=Edit] >> nth=0")
    page.fill("#answer-0 textarea", "Uno")
    page.click("#answer-0 button[title=Submit]")
    assert "no room" in problem(page)
    wait_until_done(page)
    assert messages(page) == ["One", ANSWER]
    assert page.input_value("#prompt textarea") == left


def test_who_cancels_the_deletion_of_a_chat_still_chooses_between_its_answers(page: Any, site: str) -> None:
    forget(page, site)
    open_chat(page, f"{site}/?n=2", MODEL)
    answered(page, "One")
    wait_for_titles(page, ["One"])
    assert page.evaluate("() => JSON.parse(localStorage.getItem('serve-app-chats')).map((chat) => chat.choices)") == [[]]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "queue/join" in request.url else None)
    page.once("dialog", lambda dialog: dialog.dismiss())
    page.click("#delete")
    while len(asked) < 2:
        page.wait_for_timeout(10)
    page.wait_for_timeout(500)  # the page stays as it is: there is nothing to wait for
    assert page.is_visible("#answer-1")
    page.click("#keep-1")
    wait_for_answer(page, "word1.4", 0)


def test_code_has_colours(page: Any, site: str, fake: FakeService) -> None:
    fake.line = markup("```python\ndef f(): return 1\n```")
    open_chat(page, site, MODEL)
    answered(page, "Code")
    assert page.inner_text("#answer-0 .token.keyword") == "def"


DROP = """([name, bytes]) => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


def test_a_text_file_becomes_a_part_of_the_prompt(page: Any, site: str, fake: FakeService) -> None:
    uploads: list[str] = []
    page.on("request", lambda request: uploads.append(request.url) if "upload" in request.url else None)
    open_chat(page, site, MODEL)
    page.fill("#prompt textarea", "Explain")
    page.evaluate(DROP, ["a.py", list(b"x = '```'\n")])
    quoted = "a.py:\n````py\nx = '```'\n````\n"
    page.wait_for_function("text => document.querySelector('#prompt textarea').value === text", arg=f"Explain\n\n{quoted}")
    page.evaluate(DROP, ["b.bin", [0xFF, 0x00]])
    page.wait_for_selector("#notice >> text=b.bin is not a text file")
    with page.expect_file_chooser() as chooser:
        page.click("#add-file")
    chooser.value.set_files({"name": "c.txt", "mimeType": "text/plain", "buffer": "é".encode()})
    page.wait_for_function("() => document.querySelector('#prompt textarea').value.includes('c.txt')")
    page.click("#send")
    wait_for_answer(page, "word0.4")
    assert asked_for(fake) == [f"Explain\n\n{quoted}\n\nc.txt:\n```txt\né\n```\n"]
    assert uploads == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_nothing_is_cut_off(page: Any, site: str, fake: FakeService, width: int, height: int) -> None:
    before = page.viewport_size
    page.set_viewport_size({"width": width, "height": height})
    try:
        open_chat(page, f"{site}/?n=2", MODEL)
        assert page.evaluate("() => getComputedStyle(document.querySelector('.nav-holder'), '::before').content") == '"serve-app"'
        answered(page, "Hi")
        assert_inside(page, ["#model", "#clear", "#figures", "#prompt", "#add-file", "#send", "#answer-0"])
        if width > 700:
            assert_inside(page, ["#answer-1", "#keep-0", "#keep-1"])
        fake.busy = True
        ask(page, "Hi")
        problem(page)
        assert_inside(page, ["#clear", "#problem", "#prompt", "#send"])
        if width < 700:
            page.click(".sidebar .toggle-button")
        page.click("button[role=tab] >> text=Settings")
        page.wait_for_timeout(400)  # the sidebar slides in
        assert_inside(page, ["#mode", "#system", "#temperature", "#top-p", "#n", "#max-tokens", "#stop-at", "#copy-link"])
    finally:
        page.set_viewport_size(before)


LOADS = """![image]({0}/image) <video src="{0}/video" autoplay muted></video> <audio src="{0}/audio" preload="auto"></audio>
<video autoplay muted><source src="{0}/source"></video> <p style="background: url({0}/style)">styled</p>
<form action="{0}/form"><button>go</button></form> <a href="#" ping="{0}/ping">link</a>"""
REFUSED = ["form-action", "img-src", "media-src"]


def test_a_browser_loads_nothing_from_another_host_for_an_answer(page: Any, site: str, fake: FakeService) -> None:
    asked: list[str] = []

    async def note(request: Request) -> Response:
        asked.append(request.url.path)
        return Response()

    with listening(Starlette(routes=[Route("/{path}", note)])) as other:
        fake.line = markup(LOADS.format(other))
        open_chat(page, site, MODEL)
        page.evaluate(
            """() => {
              window.refused = new Set();
              document.addEventListener("securitypolicyviolation", (event) => window.refused.add(event.effectiveDirective));
            }"""
        )
        ask(page, "Hi")
        wait_for_answer(page, "word0.4")
        wait_until_done(page)
        page.dispatch_event("#answer-0 form button", "click")  # `click` would wait for the navigation that is refused
        page.wait_for_function("names => names.every(name => window.refused?.has(name))", arg=REFUSED, timeout=10_000)
        assert asked == []


def test_an_answer_covers_no_other_part_of_the_page_and_takes_no_key_press(page: Any, site: str, fake: FakeService) -> None:
    fake.line = markup(
        '<a id="stop" href="#followed">stop</a> '
        '<p style="position: fixed; top: 0; left: 0; width: 100vw; height: 100vh; z-index: 9999">cover</p>'
    )
    fake.holds = True
    open_chat(page, site, MODEL)
    page.evaluate("() => document.addEventListener('click', (event) => (window.clicked = event.target.tagName))")
    ask(page, "Hi")
    wait_for_answer(page, "cover")
    for part in ("nav", "#figures"):
        assert page.evaluate(
            """(part) => {
              const box = document.querySelector(part).getBoundingClientRect();
              return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2).closest("#answers") === null;
            }""",
            part,
        )
    page.keyboard.press("Escape")
    assert page.evaluate("() => window.clicked") == "BUTTON"
    wait_until_done(page)


def test_the_fleet_page_follows_the_fleet(page: Any, site: str, fake: FakeService) -> None:
    fake.report = {"time": 1000.0, "members": [ingress(), member("aaa"), member("bbb")], "decisions": []}
    page.goto(f"{site}/fleet")
    page.wait_for_selector("text=bbb")
    members = [ingress(resumptions=1), member("aaa"), member("bbb", state="lost")]
    losses = [lost("bbb", time=1000.5, cause="its engine was killed")]
    models = {MODEL: {"target": 2, "starting": [starting("ccc", since=1000.6)]}}
    fake.report = {"time": 1001.0, "members": members, "decisions": [], "lost": losses, "models": models}
    page.wait_for_selector(f"text=Replica of {MODEL} bbb is lost: its engine was killed")
    page.wait_for_selector("text=1 answer resumed at another replica")
    page.wait_for_selector(f"h3:has-text('{MODEL}') >> text=1 of 2 ready, 1 starting, 1 lost")
    cards = [card.inner_text().split("\n")[:2] for card in page.query_selector_all(".fleet .card")]
    assert cards == [["aaa", "ready"], ["ccc", "starting"], ["bbb", "lost"], ["in1", "ready"]]


def test_dark_and_light_by_a_button(page: Any, site: str) -> None:
    open_chat(page, site, MODEL)
    was = "dark" in (page.get_attribute("body", "class") or "")
    page.click("#theme")
    assert ("dark" in (page.get_attribute("body", "class") or "")) is not was


def test_on_a_phone_the_chat_comes_first_and_nothing_is_wider_than_the_screen(page: Any, site: str, fake: FakeService) -> None:
    before = page.viewport_size
    page.set_viewport_size({"width": 390, "height": 844})
    try:
        open_chat(page, site, MODEL)
        page.wait_for_function(
            """() => {
              const box = document.querySelector("#prompt textarea").getBoundingClientRect();
              const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
              return top?.closest("#prompt") != null;
            }"""
        )
        ask(page, "Hi")
        wait_for_answer(page, "word0.4")
        for path in ("", "/fleet"):
            page.goto(f"{site}{path}")
            page.wait_for_function("() => document.querySelector('#theme')")
            page.wait_for_selector("#ask" if not path else ".fleet .card")
            assert page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth") <= 0
    finally:
        page.set_viewport_size(before)
