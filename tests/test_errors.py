import pickle
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, cast, get_args

import pytest

from serve_app import errors
from serve_app.errors import ConfigError, NoReplica, ServingError
from serve_app.links.protocol.errors import PeerClosed


def tree(kind: type[ServingError], depth: int = 0) -> Iterator[tuple[int, type[ServingError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        yield from tree(child, depth + 1)


KINDS = [kind for _, kind in tree(ServingError)]
VALUES: dict[object, Any] = {int: 7, bool: True, float: 2.5, str: "some text", tuple[str, ...]: ("a", "b"), dict[str, str]: {}}


def example(kind: type[ServingError]) -> ServingError:
    """Return an error with a value of the right type in each field, passed by name."""
    if "__dataclass_fields__" not in vars(kind):
        return kind()
    values = {item.name: VALUES[item.type] if item.type in VALUES else get_args(item.type)[0] for item in fields(cast(Any, kind))}
    return kind(**values)


def test_the_header_of_the_package_prints_the_tree() -> None:
    printed = re.findall(r"^( +)(\w+) +(\d{3})  (\w+)", errors.__doc__ or "", flags=re.MULTILINE)
    real = {("  " * depth + "    ", kind.__name__, str(kind.http_status), kind.code) for depth, kind in tree(ServingError)}
    assert len(printed) == len(real)
    assert set(printed) == real


def test_the_package_exports_each_error_of_its_modules() -> None:
    own = [kind.__name__ for kind in KINDS if kind.__module__.startswith("serve_app.errors.")]
    assert sorted(own) == sorted(errors.__all__)
    assert [name for name in errors.__all__ if getattr(errors, name) not in KINDS] == []


def test_codes_are_unique_and_fit_the_wire() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert [code for code in codes if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", code)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_keeps_its_fields_between_processes(kind: type[ServingError]) -> None:
    error = example(kind)
    error.add_note("seen at the ingress")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert (str(copy), repr(copy)) == (str(error), repr(error))


@pytest.mark.parametrize("kind", KINDS)
def test_an_errors_text_holds_its_fields_on_one_line(kind: type[ServingError]) -> None:
    error = example(kind)
    text = str(error)
    assert text
    assert "\n" not in text
    for value in vars(error).values():
        if isinstance(value, dict | bool):  # headers, and what chooses words: no part of the text
            continue
        assert all(str(part) in text for part in (value if isinstance(value, tuple) else (value,)))


def test_a_retry_time_is_required_where_it_is_promised_and_none_elsewhere() -> None:
    with pytest.raises(TypeError, match="retry_after_s"):
        NoReplica("tiny", 30.0)  # type: ignore[call-arg]
    assert NoReplica("tiny", 30.0, 5.0).retry_after_s == 5.0
    assert PeerClosed("shutdown", "").retry_after_s is None


def test_a_config_error_names_the_key_and_the_way_out() -> None:
    error = ConfigError("models.chat.engine_args.max_modl_len", "unknown argument", "did you mean max_model_len?")
    assert str(error) == "models.chat.engine_args.max_modl_len: unknown argument; did you mean max_model_len?"
    assert str(ConfigError("", "no such file: fleet.yaml")) == "no such file: fleet.yaml"


def test_a_peers_text_cannot_forge_a_log_line() -> None:
    assert "\n" not in str(PeerClosed("shutdown", "bye\n2026-01-01 all is well"))
