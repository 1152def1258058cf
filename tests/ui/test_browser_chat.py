"""A person chats here in a headless Chromium, in front of a fake service whose answers the test steers."""

from typing import Any

import pytest

from tests.ui.browser import (
    ANSWER,
    answer,
    answered,
    ask,
    asked_for,
    assert_inside,
    markup,
    messages,
    needs_chromium,
    open_chat,
    problem,
    wait_for_answer,
    wait_for_messages,
    wait_until_done,
)
from tests.ui.fake_service import MODEL, FakeService

pytestmark = needs_chromium


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


def test_an_edit_to_nothing_deletes_the_prompt_and_its_answer(page: Any, site: str, fake: FakeService) -> None:
    open_chat(page, site, MODEL)
    for prompt in ("One", "Two", "Three"):
        answered(page, prompt)
    asked = len(fake.asked)
    page.click("#answer-0 button[title=Edit] >> nth=1")
    page.fill("#answer-0 textarea", "")
    page.click("#answer-0 button[title=Submit]")
    wait_for_messages(page, ["One", ANSWER, "Three", ANSWER])
    assert len(fake.asked) == asked
    answered(page, "Four")
    assert asked_for(fake) == ["One", ANSWER, "Three", ANSWER, "Four"]


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
