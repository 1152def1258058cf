"""`SharedClient` asks the shared fleet of a machine on behalf of one worker process."""

import threading
from collections.abc import Sequence

from serve_app.batch.blocking import BlockingClient
from serve_app.batch.client import Failure, Limits, Reply, only_model
from serve_app.batch.requests import Request
from serve_app.batch.shared_fleet import SharedFleet
from serve_app.errors import ServiceAway


class SharedClient:
    """A client of the machine's shared fleet. All threads of the process share the client.

    A fleet that is started again has the same URL, so that requests only wait for it. If its port was taken meanwhile, the requests fail
    with `ServiceAway`, and later requests go to the new URL.
    """

    def __init__(self, fleet: SharedFleet, key: str, limits: Limits) -> None:
        """Wait until the fleet is ready.

        Raises:
            BatchError: The fleet was given up.
        """
        self._fleet, self._key, self._limits = fleet, key, limits
        self._lock = threading.Lock()
        self._url = fleet.url()
        self._client = BlockingClient(self._url, key, limits)

    def ask(self, requests: Sequence[Request]) -> list[Reply | Failure]:
        """Return the outcomes in the order of ``requests``.

        Raises:
            ServiceAway: The fleet has answered nothing for ``limits.patience_s``.
            BatchError: The fleet was given up.
        """
        url, client = self._connected()
        return client.ask(requests, lambda: self._watch(url))

    def only_model(self) -> str:
        """Return the name of the fleet's only model."""
        return only_model(self._fleet.url(), self._key, self._limits)

    def _watch(self, url: str) -> None:
        """Raise ServiceAway when the fleet is no longer at the URL that the caller's requests went to."""
        if (report := self._fleet.look()).status == "ready" and report.url != url:
            raise ServiceAway(f"the fleet has moved to {report.url}", "the runner repeats the bundle")

    def _connected(self) -> tuple[str, BlockingClient]:
        with self._lock:
            if (url := self._fleet.url()) != self._url:
                self._url, self._client = url, BlockingClient(url, self._key, self._limits)
            return self._url, self._client
