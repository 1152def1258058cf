"""`clean` removes variables that a process inherits and that would make it half work."""

import logging
from collections.abc import MutableMapping

from serve_app.config.inherited import REMOVED

logger = logging.getLogger(__name__)

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
