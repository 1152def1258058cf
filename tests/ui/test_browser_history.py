"""The browser's storage keeps the chats here, in a headless Chromium."""

from typing import Any

import pytest

from tests.ui.browser import (
    ANSWER,
    answered,
    asked_for,
    forget,
    messages,
    needs_chromium,
    open_chat,
    wait_for_answer,
    wait_for_titles,
)
from tests.ui.fake_service import MODEL, FakeService

pytestmark = needs_chromium


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
