"""This module has shorthand for tests of a fleet client."""

from typing import Any

from serve_app.ingress.http.error_answers import FleetError
from tests.doubles.fleet import Fleet

PROMPT = [1, 2, 3]


def is_running(f: Fleet, replica_id: str, *attempt_ids: str) -> bool:
    return f.running(replica_id) == list(attempt_ids)


def error_of(stream: Any) -> Exception:
    assert isinstance(stream.error, FleetError)
    assert not stream.finished
    return stream.error.error
