"""This module has a model that is right, and the messages for a file that is wrong."""

from typing import Any

import pytest

from serve_app.config import parse_settings
from serve_app.errors import ConfigError

LLAMA: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B-Instruct"}
ONE_PER_NODE = LLAMA | {"replicas_per_node": 1}


def refusal(**sections: Any) -> str:
    """What is said to a file with one good model and ``sections``, which may replace it."""
    with pytest.raises(ConfigError) as refused:
        parse_settings({"models": {"llama": LLAMA}, **sections})
    return str(refused.value)
