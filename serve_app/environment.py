"""`clean` removes variables that a process inherits and that would make it half work.

vLLM reads 300 variables, and Kubernetes sets names like theirs for a Service that is called `vllm`. Those of `REMOVED` would lock or open
some routes and not others, keep an engine from starting, or differ between the processes of a fleet. A process that inherits one drops
it, and `models.NAME.env` refuses it. All others pass.

`as_typed` writes a command for a hint, so that the user's shell finds it.
"""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, MutableMapping

logger = logging.getLogger(__name__)

_BY_RAY = "Ray places and connects engines"
_BY_LIMITS = "every process of a fleet must have the same limit"
REMOVED: Mapping[str, str] = {
    "VLLM_API_KEY": "it would lock some routes and not others; set ingress.tenants_file",
    "VLLM_PORT": "Kubernetes sets it to a URL for a Service named vllm, with which no engine starts",
    "VLLM_DP_RANK": _BY_RAY,
    "VLLM_DP_RANK_LOCAL": _BY_RAY,
    "VLLM_DP_SIZE": _BY_RAY,
    "VLLM_DP_MASTER_IP": _BY_RAY,
    "VLLM_DP_MASTER_PORT": _BY_RAY,
    "VLLM_SERVER_DEV_MODE": "the routes of vLLM's developers are not served",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "adapters are in the configuration",
    "VLLM_ENABLE_RESPONSES_API_STORE": "the next request may reach another ingress, which has not stored the response",
    "VLLM_USE_RUST_FRONTEND": "the ingress is vLLM's front end in Python",
    "VLLM_LOGGING_CONFIG_PATH": "Ray Serve has the logs; a changed set-up makes its controller replace every replica",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "pickle from the wire would let a peer run code",
    "VLLM_V1_USE_OUTLINES_CACHE": "clients' schemas would fill the disk",
    "VLLM_MAX_NUM_BAD_WORDS": _BY_LIMITS,
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": _BY_LIMITS,
}
"""Variable -> why it is removed."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def clean(environment: MutableMapping[str, str]) -> None:
    """Remove the variables of `REMOVED`, with a warning for each, and let no proxy come between processes of one machine.

    With `HTTP_PROXY` set, `serve-app up` asked the proxy whether its own ingress is ready, and never said so.
    """
    for name in sorted(REMOVED.keys() & environment.keys()):
        del environment[name]
        logger.warning("%s is in the environment and has no effect: %s", name, REMOVED[name])
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in environment.get(name, "").split(",") if host]
        if "*" not in hosts and any(environment.get(proxy) for proxy in _PROXIES):
            environment[name] = ",".join([*hosts, *(host for host in LOOPBACK if host not in hosts)])


_PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def as_typed(name: str = "serve-app", *, beside: str = "") -> str:
    """Return a program of this installation as the user can call it: its name if the shell finds this very program by it, else its path.

    A user who called `.venv/bin/serve-app` without an activated environment gets `.venv/bin/serve-app` and `.venv/bin/pip`.

    Args:
        beside: Path of a program of this installation. Default: that of this process, if it was started as serve-app; in other processes,
            such as Ray's workers, the name alone is returned.
    """
    own = beside or (sys.argv[0] if os.path.basename(sys.argv[0]) == "serve-app" else "")
    path = os.path.join(os.path.dirname(own), name)
    found = shutil.which(name)
    if not own or not os.path.exists(path) or (found is not None and os.path.samefile(found, path)):
        return name
    return shlex.quote(path)
