"""These tests compare the ten sentences of docs/autoscaling.md with the code."""

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "autoscaling.md"
_ITEM = re.compile(r"^(\d+)\. ", re.MULTILINE)
_NAMES = re.compile(r"\((`[\w.]+`(?:, `[\w.]+`)*)\)")
"""Functions as the page names them: (`file.function`, `file.Class.method`)."""


def sentences() -> list[str]:
    """Return the numbered items behind "In ten sentences", each on one line."""
    text = PAGE.read_text().split("\nIn ten sentences", 1)[1].split("\n|", 1)[0]
    numbers, items = _ITEM.findall(text), _ITEM.split(text)[2::2]
    assert numbers == [str(number) for number in range(1, len(items) + 1)]
    return [" ".join(item.split()) for item in items]


def test_the_ten_sentences_are_ten() -> None:
    assert [len(re.findall(r"[.!?](?= |$)", item)) for item in sentences()] == [1] * 10


@pytest.mark.parametrize("item", sentences(), ids=lambda item: item[:30])
def test_each_of_the_ten_sentences_names_functions_that_exist(item: str) -> None:
    names = [name for group in _NAMES.findall(item) for name in re.findall(r"[\w.]+", group)]
    assert names
    for name in names:
        file, *path = name.split(".")
        assert callable(reduce(getattr, path, importlib.import_module(f"serve_app.autoscaling.{file}"))), name
