"""This module sends our log lines, inside a Ray Serve replica, to the handlers that Serve gave its own logger."""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from serve_app.config import Settings

logger = logging.getLogger(__name__)

MASK = "***"
_SECRET_WORDS = frozenset({"token", "key", "secret", "password", "passwd", "credential", "credentials", "authorization"})
_USER_OF_A_URL = re.compile(r"://[^/@\s]+@")


def use_serve_handlers() -> None:
    """Send ``serve_app`` lines to the replica's log. Never use dictConfig, which would close Serve's handlers (docs/architecture.md)."""
    ours = logging.getLogger("serve_app")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.handlers = list(logging.getLogger("ray.serve").handlers)


def log_configuration(settings: Settings) -> None:
    """Log the configuration of this process in one line: every key with its value, including defaults, with secrets masked."""
    logger.info("configuration: %s", json.dumps(masked(settings.model_dump(mode="json"))))


def masked(value: Any) -> Any:
    """Return plain data with `MASK` in place of possible secrets.

    Possible secrets are each value of a mapping ``env``, each text under a key with a word such as ``token`` in it, and user and password
    of a URL.
    """
    if isinstance(value, Mapping):
        return {key: MASK if _holds_secret(str(key), inner) else _inside(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    return _USER_OF_A_URL.sub(f"://{MASK}@", value) if isinstance(value, str) else value


def _inside(key: str, value: Any) -> Any:
    return dict.fromkeys(value, MASK) if key == "env" and isinstance(value, Mapping) else masked(value)


def _holds_secret(key: str, value: Any) -> bool:
    """Return whether a value is a secret by its key. Names of files and numbers of tokens are no secrets."""
    words = re.split(r"[_\W]+", key.lower())
    return isinstance(value, str) and words[-1] != "file" and not _SECRET_WORDS.isdisjoint(words)
