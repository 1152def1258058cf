"""The pages keep their form here in windows of both sizes, in a headless Chromium."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ui.axe import findings, findings_in_both_themes
from tests.ui.browser import (
    answered,
    ask,
    assert_inside,
    markup,
    needs_chromium,
    open_chat,
    problem,
    wait_for_answer,
)
from tests.ui.fake_service import KEY, MODEL, FakeService, ingress, lost, member, starting, way

pytestmark = needs_chromium


KILLED = "its engine was killed, or crashed without a message"
WAYS = {
    "time": 1001.0,
    "moved": [way(f"chatcmpl-{number}", ("aaa", KILLED), ("bbb", "the replica drains"), ("ccc", "")) for number in range(4)],
    "others": [
        way(f"mine-{number}", ("aaa", ""), state=state, queued_s=12.34, output_tokens=1024, total_s=24.5)
        for number, state in enumerate(("queued", "complete", "over_quota"))
    ],
}
"""As many requests as the page draws."""
LINES = """(selector) => [...document.querySelectorAll(selector)].map((element) => {
  const text = document.createRange();
  text.selectNodeContents(element);
  return new Set([...text.getClientRects()].map((line) => line.top)).size;
})"""
"""In how many lines each element's text is drawn."""
ARROWS = """() => [...document.querySelectorAll(".way .tile + .tile")].map((next) => {
  const [from, to] = [next.previousElementSibling, next].map((tile) => tile.getBoundingClientRect());
  const arrow = getComputedStyle(next, "::before").content;
  return [arrow, Math.round(arrow === '"→"' ? to.left - from.right : to.top - from.bottom)];
})"""
"""Each arrow, and the pixels between the two counts that it joins, in its direction."""


@contextmanager
def window(page: Any, width: int, height: int) -> Iterator[None]:
    """Give the window another size while the block lasts."""
    before = page.viewport_size
    page.set_viewport_size({"width": width, "height": height})
    try:
        yield
    finally:
        page.set_viewport_size(before)


def show_settings(page: Any) -> None:
    if not page.query_selector(".sidebar.open"):
        page.click(".sidebar .toggle-button")
    page.click("button[role=tab] >> text=Settings")
    page.wait_for_timeout(400)  # the sidebar slides in


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_nothing_is_cut_off(page: Any, site: str, fake: FakeService, width: int, height: int) -> None:
    with window(page, width, height):
        open_chat(page, f"{site}/?n=2", MODEL)
        assert page.evaluate("() => getComputedStyle(document.querySelector('.nav-holder'), '::before').content") == '"serve-app"'
        answered(page, "Hi")
        assert set(page.evaluate(LINES, "#figures span")) == {1}
        assert_inside(page, ["#model", "#clear", "#figures", "#prompt", "#add-file", "#send", "#answer-0"])
        if width > 700:
            assert_inside(page, ["#answer-1", "#keep-0", "#keep-1"])
        fake.busy = True
        ask(page, "Hi")
        problem(page)
        assert_inside(page, ["#clear", "#problem", "#prompt", "#send"])
        show_settings(page)
        assert_inside(page, ["#mode", "#system", "#temperature", "#top-p", "#n", "#max-tokens", "#stop-at", "#copy-link"])


def test_axe_core_finds_what_is_wrong(page: Any, site: str) -> None:
    page.goto(f"{site}/healthz")
    page.evaluate("() => { document.title = 'Title'; document.body.append(document.createElement('img')); }")
    assert any(found.startswith("image-alt: [(['img'], ") for found in findings(page))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_axe_core_finds_nothing_serious_on_the_chat_page(
    page: Any, site: str, fake: FakeService, width: int, height: int
) -> None:
    with window(page, width, height):
        open_chat(page, f"{site}/?n=2", MODEL)
        assert findings_in_both_themes(page, "an empty chat") == []
        fake.line = markup("```python\ndef f(): return 1\n```\n\n| a | [b](http://c) |\n|---|---|\n| 1 | 2 |")
        answered(page, "Hi")
        assert findings_in_both_themes(page, "an answer with code and a table") == []
        fake.busy = True
        ask(page, "Hi")
        problem(page)
        show_settings(page)
        assert findings_in_both_themes(page, "a refusal, and the settings") == []


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_axe_core_finds_nothing_serious_on_the_fleet_page(
    page: Any, site: str, fake: FakeService, width: int, height: int
) -> None:
    members = [ingress(), member("aaa"), member("bbb", state="draining")]
    models = {MODEL: {"target": 2, "starting": [starting("ccc", since=1000.6)]}}
    fake.report = {"time": 1001.0, "members": members, "decisions": [], "lost": [lost("ddd", time=1000.0)], "models": models}
    fake.ways = WAYS
    with window(page, width, height):
        page.goto(f"{site}/fleet")
        page.wait_for_selector("text=ddd is lost")
        page.wait_for_selector(".ways >> text=mine-2")
        assert findings_in_both_themes(page, "a lost replica, and requests that moved") == []


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
    page.wait_for_selector(f"h2:has-text('{MODEL}') >> text=1 of 2 ready, 1 starting, 1 lost")
    cards = [card.inner_text().split("\n")[:2] for card in page.query_selector_all(".fleet .card")]
    assert cards == [["aaa", "ready"], ["ccc", "starting"], ["bbb", "lost"], ["in1", "ready"]]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_requests_way_shows_its_replicas_in_the_first_window_and_nothing_of_it_is_cut(
    page: Any, site: str, fake: FakeService, width: int, height: int
) -> None:
    fake.ways = WAYS
    with window(page, width, height):
        page.goto(f"{site}/fleet")
        page.wait_for_selector(f".ways li:has-text('chatcmpl-3') >> text=/moved: {KILLED}/")
        first = page.query_selector(".ways li")
        assert [at.inner_text() for at in first.query_selector_all(".path b")] == ["aaa", "bbb", "ccc"]
        assert_inside(page, ["#kill", ".ways li >> nth=0"])
        if width > 700:
            assert_inside(page, [".ways li >> nth=3"])
            assert page.evaluate(LINES, ".ways .numbers") == [1] * 7
        assert (
            page.evaluate("() => [...document.querySelectorAll('.ways div')].filter((e) => e.scrollWidth > e.clientWidth).length")
            == 0
        )


@pytest.mark.parametrize(("width", "arrow"), [(1280, "→"), (800, "→"), (390, "↓")])
def test_each_arrow_of_the_way_of_requests_is_between_two_counts(page: Any, site: str, width: int, arrow: str) -> None:
    with window(page, width, 844):
        page.goto(f"{site}/fleet")
        page.wait_for_selector(".fleet .card")
        assert page.evaluate(ARROWS) == [[f'"{arrow}"', 12]] * 3


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_what_can_be_clicked_on_the_fleet_page_stays_in_its_place(
    page: Any, site: str, fake: FakeService, width: int, height: int
) -> None:
    def places() -> list[Any]:
        return [page.wait_for_selector(selector).bounding_box() for selector in ("#kill", "#fleet-key", "#theme")]

    shown = fake.report
    with window(page, width, height):
        fake.asks_for_key = True
        page.goto(f"{site}/fleet")
        page.wait_for_selector("#fleet-problem >> text=(401)")
        before = places()
        fake.ways = WAYS
        page.fill("#fleet-key input", KEY)
        page.wait_for_selector(".fleet .card")
        assert places() == before
        fake.report = {}
        page.wait_for_selector("#fleet-problem >> text=did not answer with a fleet")
        assert places() == before
        fake.report = shown
        page.click("#kill")
        page.wait_for_selector("#killed >> text=No replica is ready")
        assert places() == before


def test_the_button_of_a_demo_has_its_place_before_the_service_has_answered(page: Any, site: str, fake: FakeService) -> None:
    fake.asks_for_key = True
    page.goto(f"{site}/fleet")
    before = page.wait_for_selector("#kill").bounding_box()
    page.wait_for_selector("#fleet-problem")
    fake.asks_for_key = False
    page.wait_for_selector(".fleet .card")
    assert page.wait_for_selector("#kill").bounding_box() == before


def test_the_fleet_page_of_a_demo_kills_an_engine(page: Any, site: str, fake: FakeService) -> None:
    engine = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fake.report = {"time": 1000.0, "members": [ingress(), member("aaa", engine_pid=engine.pid)], "decisions": []}
    with engine:
        page.goto(f"{site}/fleet")
        page.click("#kill")
        page.wait_for_selector(f"#killed >> text=Killed the engine of replica aaa, process {engine.pid}")
        assert engine.wait() == -signal.SIGKILL


def test_dark_and_light_by_a_button(page: Any, site: str) -> None:
    open_chat(page, site, MODEL)
    was = "dark" in (page.get_attribute("body", "class") or "")
    page.click("#theme")
    assert ("dark" in (page.get_attribute("body", "class") or "")) is not was


def test_on_a_phone_the_chat_comes_first_and_nothing_is_wider_than_the_screen(page: Any, site: str, fake: FakeService) -> None:
    with window(page, 390, 844):
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
