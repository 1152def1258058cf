"""A replica reserves the port of its engine's side channel, at which other engines ask where the KV is that they are to read.

vLLM binds the port only after it has loaded the model, and hangs if the port is taken then. So the supervisor binds a port before, without
listening, and keeps it: Linux lets the engine bind it, too, because both sockets have SO_REUSEADDR by then. It refuses the port to other
replicas, which bind without.
"""

import socket
from dataclasses import dataclass

from serve_app.errors import ListenFailed


@dataclass(frozen=True)
class SideChannel:
    """A reserved port. ``sock`` keeps it reserved."""

    host: str
    port: int
    sock: socket.socket

    def environment(self) -> dict[str, str]:
        """Return the environment by which vLLM listens here, and names this address to other engines."""
        return {"VLLM_NIXL_SIDE_CHANNEL_HOST": self.host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port)}


def reserve(host: str, ports: range, key: str) -> SideChannel:
    """Reserve the first free port.

    Args:
        host: An address of this machine that other nodes reach.
        ports: At least one; 0 is any port.
        key: The setting of the ports.

    Raises:
        ListenFailed: None is free, or the address is not ours.
    """
    failed = OSError("no port")
    for port in ports:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind((host, port))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError as exc:
            sock.close()
            failed = exc
        else:
            return SideChannel(host, sock.getsockname()[1], sock)
    reason = f"{failed.strerror or failed}, as at the {len(ports) - 1} ports after it"
    raise ListenFailed(host=host, port=ports[0], reason=reason, key=key) from failed
