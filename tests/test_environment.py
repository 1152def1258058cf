"""Variables that a process inherits: those that make it half work are dropped, and a proxy never stands before the own machine."""

import logging

import pytest
from vllm import envs

from serve_app.environment import REMOVED, clean


def test_a_variable_that_would_make_the_process_half_work_is_dropped_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"VLLM_API_KEY": "secret", "VLLM_PORT": "tcp://10.0.0.1:80", "VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    with caplog.at_level(logging.WARNING):
        clean(environment)
    assert environment == {"VLLM_LOGGING_LEVEL": "DEBUG", "PATH": "/bin"}
    assert "VLLM_API_KEY is in the environment and has no effect" in caplog.text
    assert "set ingress.tenants_file" in caplog.text
    assert "secret" not in caplog.text


def test_every_dropped_variable_is_one_that_vllm_reads() -> None:
    assert REMOVED.keys() - envs.environment_variables.keys() == set()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"HTTP_PROXY": "http://proxy"}, "127.0.0.1,localhost,::1"),
        ({"https_proxy": "http://proxy", "NO_PROXY": "internal,localhost"}, "internal,localhost,127.0.0.1,::1"),
        ({"HTTP_PROXY": "http://proxy", "NO_PROXY": "*"}, "*"),
    ],
)
def test_a_proxy_never_stands_between_processes_of_one_machine(before: dict[str, str], after: str) -> None:
    clean(before)
    assert before["NO_PROXY"] == after


def test_without_a_proxy_nothing_is_added() -> None:
    environment = {"PATH": "/bin"}
    clean(environment)
    assert environment == {"PATH": "/bin"}
