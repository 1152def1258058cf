"""`SharedClient` follows its machine's fleet to another port."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from serve_app.batch.client import Limits, Reply
from serve_app.batch.fleet_keeper import KeeperReport
from serve_app.batch.requests import Defaults, Request, request_of_example
from serve_app.batch.shared_client import SharedClient
from serve_app.batch.shared_fleet import SharedFleet
from serve_app.errors import ServiceAway
from tests.batch.service import Service
from tests.e2e.fleet import wait_until


class FakeFleet:
    """A fleet that is ready at ``service``."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def url(self) -> str:
        return self.service.url

    def look(self) -> KeeperReport:
        return KeeperReport(1, "ready", self.service.url)


def request(prompt: str) -> Request:
    return request_of_example(1, prompt, Defaults("tiny"))


def test_a_thread_whose_fleet_has_moved_notices_it_also_when_another_thread_was_first() -> None:
    old, new, answered = Service(), Service(), threading.Event()

    def answer_late(prompt: str) -> int:
        answered.wait(60.0)
        return 200

    old.verdict = answer_late
    fleet = FakeFleet(old)
    client = SharedClient(cast("SharedFleet", fleet), "", Limits())
    with ThreadPoolExecutor(1) as threads:
        try:
            late = threads.submit(client.ask, [request("late")])
            wait_until(lambda: old.asked["late"] == 1, limit_s=30.0, what="the old fleet has the request")
            fleet.service = new
            (outcome,) = client.ask([request("prompt")])
            assert isinstance(outcome, Reply)
            with pytest.raises(ServiceAway, match=f"the fleet has moved to {new.url}"):
                late.result(30.0)
        finally:
            answered.set()
    for service in (old, new):
        service.close()
