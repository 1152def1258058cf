"""NIXL's UCX listens only on the ports that `KvSettings` gives it, which firewalls and the chart's network policy name.

NIXL's agents in CPU engines have a longest wait.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from serve_app.config import KvSettings

pytestmark = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: the extra serve-app[kv]")
_LISTENING = "0A"
AGENT = """
import json, os
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("ports", nixl_agent_config(backends=["UCX"], num_threads=4))
links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
rows = [line.split() for table in ("tcp", "tcp6") if os.path.exists(f"/proc/net/{table}") for line in open(f"/proc/net/{table}")]
print(json.dumps([[row[1], row[3]] for row in rows if f"socket:[{row[9]}]" in links]))
"""


def test_ucx_listens_on_the_models_other_ports_alone() -> None:
    kv = KvSettings(transfer="nixl", port=21000)
    environment = {**os.environ, **kv.environment(), "UCX_TLS": "tcp,sm,self"}
    done = subprocess.run([sys.executable, "-c", AGENT], env=environment, capture_output=True, text=True, timeout=120, check=True)
    sockets = json.loads(done.stdout.splitlines()[-1])
    ports = [int(address.rpartition(":")[2], 16) for address, state in sockets if state == _LISTENING]
    assert len(ports) >= 4
    assert set(ports) <= set(kv.ports()) - set(kv.side_ports())


WAITS = """
import serve_app.replica.nixl_worker
from nixl import _api
configs = []
class Seen(_api.nixlBind.nixlAgentConfig):
    def __init__(self):
        super().__init__()
        configs.append(self)
_api.nixlBind.nixlAgentConfig = Seen
agent = _api.nixl_agent("waits", _api.nixl_agent_config(backends=["UCX"], num_threads=1))
print(*[config.pthrDelay for config in configs])
"""


def test_the_agent_of_a_cpu_engine_has_a_longest_wait() -> None:
    environment = {**os.environ, "UCX_TLS": "tcp,sm,self"}
    done = subprocess.run([sys.executable, "-c", WAITS], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "1000"
