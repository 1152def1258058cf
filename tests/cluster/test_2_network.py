"""These tests check the network policies: from outside the release only the HTTP port of the ingress answers."""

import json
from typing import Any

import pytest

from tests.cluster.kube import is_ready, kubectl
from tests.cluster.release import NAMESPACE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def is_reached(target):
    host, port = target.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False
    return True
targets = sys.argv[1:]
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps([target for target, reached in zip(targets, pool.map(is_reached, targets)) if reached]))
"""
GCS, DASHBOARD, RAY_CLIENT, METRICS, AGENT, HTTP, LINK = 6379, 8265, 10001, 8080, 52365, 8010, 8020


def address(release: Release, component: str) -> str:
    pod = next(p for p in release.pods(component) if is_ready(p))
    return str(pod["status"]["podIP"])


def reached_from(pod: str, *targets: str) -> Any:
    command = ("exec", "-i", "-n", NAMESPACE, pod, "-c", "ray-worker", "--", "python", "-", *targets)
    return json.loads(kubectl(*command, stdin=CONNECT))


def test_from_outside_only_http_is_reached(release: Release) -> None:
    head, ingress, model = (address(release, component) for component in ("head", "ingress", "model"))
    closed = [f"{head}:{port}" for port in (GCS, DASHBOARD, RAY_CLIENT, METRICS, AGENT)]
    closed += [f"{model}:{port}" for port in (LINK, METRICS, AGENT)] + [f"{ingress}:{port}" for port in (METRICS, AGENT)]
    assert json.loads(release.python(CONNECT, *closed, f"{ingress}:{HTTP}")) == [f"{ingress}:{HTTP}"]


def test_inside_the_release_those_ports_do_answer(release: Release) -> None:
    """Or the test above would pass of a release that is not there."""
    head, model = address(release, "head"), address(release, "model")
    needed = [f"{head}:{GCS}", f"{head}:{AGENT}", f"{model}:{LINK}", f"{model}:{AGENT}"]
    assert reached_from(release.ready_pods("ingress")[0], *needed) == needed
