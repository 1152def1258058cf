"""A YAML document whose aliases repeat too much is refused at once, with its place; other aliases stay allowed."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.cli.manifests import documents_in
from serve_app.config.checks import load_yaml
from serve_app.errors import ConfigError
from tests.config.bombs import bomb

LISTS, MAPPINGS, MERGES = bomb("[*{0}, *{0}]"), bomb("{{a: *{0}, b: *{0}}}"), bomb("{{<<: [*{0}, *{0}]}}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("load", [load_yaml, documents_in])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        (LISTS, "line 18, column 6"),  # x0 has 3 values, and x17 has 2 ** 17 * 4 - 1
        (MAPPINGS, "line 18, column 6"),
        (MERGES, "line 18, column 16"),
        (f"{LISTS}? *x39\n: 1\n", "line 18, column 6"),
        ("a: &a {b: *a}", "line 1, column 4"),
        ("a: &a [[*a]]", "line 1, column 8"),
        (f"a: &a {'x' * 100_000}\nb: [{'*a, ' * 600}]", "line 2, column 4"),
    ],
    ids=["lists", "mappings", "merges", "key", "self", "self deeper", "texts"],
)
def test_more_values_than_the_limit_are_refused_with_their_place(load: Callable[[str], Any], text: str, place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(text)
    assert str(refused.value) == (
        f"{place}: holds more than 500,000 values, those that aliases repeat included; use fewer aliases; "
        "an alias below its own anchor repeats without end"
    )


def test_anchors_aliases_and_merge_keys_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}"
    assert load_yaml(text) == documents_in(text)[0] == {"a": {"x": 1}, "b": {"x": 1, "y": [{"x": 1}, {"x": 1}]}}
