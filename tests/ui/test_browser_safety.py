"""An answer tries here to leave its place on the chat page, in a headless Chromium."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.ui.browser import (
    ask,
    markup,
    needs_chromium,
    open_chat,
    wait_for_answer,
    wait_until_done,
)
from tests.ui.fake_service import MODEL, FakeService, listening

pytestmark = needs_chromium


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
