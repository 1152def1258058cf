"""This module drives Debian's Chromium by Playwright, as a person uses the chat page."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ui.fake_service import MODEL, FakeService

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed; Debian: apt install chromium")
LIMIT_MS = 90_000
ANSWER = "word0.0 word0.1 word0.2 word0.3 word0.4"
"""What the fake service answers."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a page of a headless Chromium. Without its sandbox, which root and most containers cannot have."""
    playwright_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make .venv")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
            page.set_default_timeout(LIMIT_MS)
            yield page
        finally:
            browser.close()


def open_chat(page: Any, url: str, model: str) -> None:
    """Open the chat page, and wait until it knows the models."""
    page.goto(url)
    page.wait_for_function("name => document.querySelector('#model input')?.value === name", arg=model)


def ask(page: Any, prompt: str) -> None:
    """Type a prompt, and send it by Enter."""
    page.fill("#prompt textarea", prompt)
    page.press("#prompt textarea", "Enter")


def answer(page: Any, number: int = 0) -> str:
    """Return the last message of a column; empty before there is one."""
    messages = page.query_selector_all(f"#answer-{number} .message.bot, #answer-{number} .bot .message")
    return str(messages[-1].inner_text()) if messages else ""


def wait_for_answer(page: Any, text: str, number: int = 0) -> None:
    page.wait_for_function(
        "([id, text]) => document.getElementById(id)?.innerText.includes(text)", arg=[f"answer-{number}", text]
    )


def wait_until_done(page: Any) -> None:
    page.wait_for_selector("#send", state="visible")


def problem(page: Any) -> str:
    """Return the sentence about what went wrong, once there is one."""
    return str(page.wait_for_selector("#problem [role=alert]").inner_text())


def answered(page: Any, prompt: str) -> None:
    """Ask, and wait until the answer is complete."""
    ask(page, prompt)
    page.wait_for_function(
        """prompt => {
          const texts = [...document.querySelectorAll("#answer-0 [data-testid=user], #answer-0 [data-testid=bot]")]
            .map((message) => message.innerText.trim());
          return texts.at(-2) === prompt && texts.at(-1).endsWith("word0.4");
        }""",
        arg=prompt,
    )
    wait_until_done(page)


def messages(page: Any) -> list[str]:
    """Return the texts of the first column, prompts and answers in turn."""
    found = page.query_selector_all("#answer-0 [data-testid=user], #answer-0 [data-testid=bot]")
    return [message.inner_text().strip() for message in found]


def wait_for_messages(page: Any, expected: list[str]) -> None:
    """Wait until the first column has these prompts and answers. A change of turns is shown in steps."""
    page.wait_for_function(
        """expected => {
          const texts = [...document.querySelectorAll("#answer-0 [data-testid=user], #answer-0 [data-testid=bot]")]
            .map((message) => message.innerText.trim());
          return JSON.stringify(texts) === JSON.stringify(expected);
        }""",
        arg=expected,
    )


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


def wait_for_titles(page: Any, expected: list[str]) -> None:
    page.wait_for_function(
        """expected => {
          const titles = [...document.querySelectorAll("#chats label")].map((label) => label.innerText.trim());
          return JSON.stringify(titles) === JSON.stringify(expected);
        }""",
        arg=expected,
    )


def assert_inside(page: Any, selectors: list[str]) -> None:
    """Assert that elements are wholly inside the window, and that nothing is wider than it."""
    size = page.viewport_size
    for selector in selectors:
        box = page.wait_for_selector(selector).bounding_box()
        assert box["x"] >= 0, selector
        assert box["y"] >= 0, selector
        assert box["x"] + box["width"] <= size["width"], selector
        assert box["y"] + box["height"] <= size["height"], selector
    assert page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth") <= 0
