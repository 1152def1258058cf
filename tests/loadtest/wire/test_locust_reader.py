"""This test shows why we read streams ourselves: Locust's reader fails T3 of the self-tests. If it passes one day, look again."""

import subprocess
import sys
import threading
from itertools import pairwise

from tests.loadtest.scripted import CHUNKED, DONE, Peer, Server, ask, chunk, event

LOCUST = """
import sys, time
from locust.contrib.fasthttp import FastHttpSession
from locust.env import Environment
session = FastHttpSession(base_url=sys.argv[1], request_event=Environment().events.request, user=None)
lines = session.iter_lines("/v1/completions", method="POST", data=b"{}")
print(*[time.perf_counter() for line in lines if line.startswith("data: {")])
"""
NUM_EVENTS, GAP_S = 40, 0.02


def paced(peer: Peer) -> None:
    peer.answer(CHUNKED)
    never = threading.Event()
    for _ in range(NUM_EVENTS):
        never.wait(GAP_S)  # the known gap
        peer.conn.sendall(chunk(event("a")))
    peer.conn.sendall(chunk(DONE) + b"0\r\n\r\n")


def num_apart(times: list[float]) -> int:
    """Return the number of events that were seen at least half of the true gap after the event before."""
    return sum(after - before > GAP_S / 2 for before, after in pairwise(times))


def test_locusts_own_reader_sees_few_of_the_gaps_that_ours_sees() -> None:
    ours = ask(paced)
    server = Server(paced)
    output = subprocess.run([sys.executable, "-c", LOCUST, server.url], capture_output=True, text=True, timeout=120, check=True)
    server.join()
    locusts = [float(word) for word in output.stdout.split()]
    assert (sum(n for _, n in ours.chunks), len(locusts)) == (NUM_EVENTS, NUM_EVENTS)
    # 1024 bytes at a time are about 16 events: 40 events can be seen in 3 groups.
    assert num_apart(locusts) <= 8
    assert num_apart([ms / 1000 for ms, _ in ours.chunks]) >= 15  # 39 on a quiet machine
