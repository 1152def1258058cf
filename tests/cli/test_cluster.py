"""Which cluster a command asks."""

import socket
from pathlib import Path

import pytest

from serve_app.cli import cluster
from serve_app.cli.cluster import RunState, connect_to_run
from serve_app.errors import ClusterFailed


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Address, namespace and token of each connection that was made. One `serve-app up`, named `mine`, runs here: this process."""
    made: list[tuple[str, ...]] = []
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr(cluster, "connect", lambda *to: made.append(to))
    RunState.of_this_process("mine", "127.0.0.1:6379", "secret", "http://127.0.0.1:8010").save()
    return made


def test_without_an_address_it_is_the_one_that_up_started_here(connected: list[tuple[str, ...]]) -> None:
    assert (connect_to_run("mine", ""), connected) == ("http://127.0.0.1:8010", [("127.0.0.1:6379", "mine", "secret")])


def test_a_given_address_is_asked_though_another_runs_here(connected: list[tuple[str, ...]]) -> None:
    assert (connect_to_run("mine", "10.0.0.1:6379"), connected) == ("", [("10.0.0.1:6379", "mine")])


def test_a_name_that_does_not_run_here_is_told_with_those_that_do(connected: list[tuple[str, ...]]) -> None:
    with pytest.raises(ClusterFailed, match="no application named 'other' runs on this machine; running here: mine"):
        connect_to_run("other", "")
    assert connected == []


def test_an_address_where_nothing_listens_is_refused_before_ray_is_loaded() -> None:
    """Ray would try for more than a minute."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ClusterFailed, match=rf"^no Ray cluster answers at 127.0.0.1:{port}: .*Connection refused; name the GCS"):
        cluster.connect(f"127.0.0.1:{port}", "any")
