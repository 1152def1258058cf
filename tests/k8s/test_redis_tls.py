"""Ray reads a Redis behind TLS, as ElastiCache is, by the variable that the chart gives its head, and trusts nobody without it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from serve_app.config import TlsSettings
from tests.chart.render import render, tool
from tests.doubles.certificates import make_tls
from tests.ports import free_port

pytestmark = [
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server (Debian: apt install redis-server)"),
    pytest.mark.skipif(tool("helm") is None, reason="helm is not installed"),
]

ASK = """
import sys
from ray._private.services import serialize_config
from ray._raylet import get_session_key_from_storage
print(get_session_key_from_storage("127.0.0.1", int(sys.argv[1]), "", "secret", True, serialize_config({}), b"session_name"))
"""
"""How a head that starts asks Redis for the session of the head before it; prints None where there was none."""


@dataclass(frozen=True)
class Redis:
    port: int
    tls: TlsSettings


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    tls, port = make_tls(tmp_path, "redis"), free_port()
    files = ["--tls-cert-file", str(tls.cert_file), "--tls-key-file", str(tls.key_file), "--tls-ca-cert-file", str(tls.ca_file)]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--requirepass", "secret", *files]
    with subprocess.Popen(
        [*command, "--tls-auth-clients", "no", "--save", ""], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert any("Ready to accept connections" in line for line in process.stdout), "redis-server ended"
        yield Redis(port, tls)
        process.kill()


def asked(redis: Redis, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `ASK` in a process of its own, which Ray's client ends when it cannot connect."""
    command = [sys.executable, "-c", ASK, str(redis.port)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_ray_reaches_a_redis_behind_tls_by_the_variable_of_the_chart_alone(redis: Redis) -> None:
    values = {"gcsFaultTolerance": {"enabled": True, "address": "rediss://localhost:6379", "existingSecret": "s"}}
    (name,) = (variable for variable in render(values).environment("head") if "REDIS_CA" in variable)
    assert asked(redis, {name: str(redis.tls.ca_file)}).stdout == "None\n"
    assert asked(redis, {}).returncode != 0
