"""`free_port` finds a port of this machine for a test's server."""

import socket


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 at which nothing listens; another process may take it before the server does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
