"""The laws compute when each part of an answer is due. Pure: no clock; draws depend only on seed, request id and purpose.

There are two times, both in seconds from the first request: *real* time, and *server* time, which stops during a stall. Laws are
evaluated in server time. With finite slots the queue is Kiefer and Wolfowitz's recursion: start = max(arrival, earliest free slot).
"""

import heapq
import struct
from dataclasses import dataclass
from hashlib import shake_128
from itertools import accumulate

from loadtest.proof.truth.settings import Failure, Law


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one request, in real seconds from the first request."""

    arrival_s: float
    accepted_s: float
    """``arrival_s``, or the end of a stall at that time."""
    start_s: float
    """When the request gets a slot."""
    made_s: list[float]
    """When each chunk is ready in the slot."""
    sent_s: list[float]
    """When each chunk is due on the wire, later by the edge."""


class Laws:
    """A law file with a seed, and the state of the queue; requests must be given in order of arrival."""

    def __init__(self, law: Law, *, seed: int) -> None:
        self._law = law
        self._seed = seed
        self._free_at = [0.0] * law.slots  # a heap, in server time

    def uniforms(self, request_id: str, what: str, count: int = 1) -> list[float]:
        """Return ``count`` draws, 0 < u < 1, from SHAKE-128: a longer list begins with the shorter list."""
        words = struct.unpack(f"<{count}Q", shake_128(f"{self._seed}/{what}/{request_id}".encode()).digest(8 * count))
        return [((word >> 12) + 0.5) * 2.0**-52 for word in words]

    def failure(self, request_id: str, number: int) -> Failure | None:
        """Return the failure of the request, the ``number``-th to arrive, from 1."""
        for index, failure in enumerate(self._law.failures):
            if failure.every:
                if number % failure.every == 0:
                    return failure
            elif self.uniforms(request_id, f"failure-{index}")[0] < failure.probability:
                return failure
        return None

    def refuses(self, arrival_s: float) -> bool:
        """Return whether a request that arrives at this time is refused because all slots are busy."""
        return self._law.refuses_when_full and self._free_at[0] > self.server_time(arrival_s)

    def timing(self, request_id: str, *, arrival_s: float, num_chunks: int, prompt_tokens: int = 0) -> Timing:
        """Return the request's times, and occupy a slot until the last chunk is made; without chunks, occupy none."""
        arrival = self.server_time(arrival_s)
        accepted_s = self.real_time(arrival)
        if not num_chunks:
            return Timing(arrival_s, accepted_s, accepted_s, [], [])
        start = max(arrival, self._free_at[0]) if self._free_at else arrival
        factor = self._slowness(start)
        prompt_s = self._law.prompt_token_s * prompt_tokens
        made = [start + factor * (prompt_s + part) for part in self._parts(request_id, num_chunks)]
        if self._free_at:
            heapq.heapreplace(self._free_at, made[-1])
        edge = self._law.edge.quantile(self.uniforms(request_id, "edge")[0])
        real = self.real_time
        made_s = [real(at) for at in made]
        sent_s = [real(at + edge) for at in made] if edge else made_s
        return Timing(arrival_s, accepted_s, real(start), made_s, sent_s)

    def _parts(self, request_id: str, num_chunks: int) -> list[float]:
        """Return when each chunk is made, in server seconds after the start."""
        if self._law.service is not None:
            service = self._law.service.quantile(self.uniforms(request_id, "service")[0])
            return [service * (k + 1) / num_chunks for k in range(num_chunks)]
        first = self._law.ttft.quantile(self.uniforms(request_id, "ttft")[0])
        gap = self._law.gap.quantile
        return list(accumulate((gap(u) for u in self.uniforms(request_id, "gap", num_chunks - 1)), initial=first))

    def _slowness(self, start: float) -> float:
        warm_up = self._law.warm_up
        if warm_up is None or start >= warm_up.for_s:
            return 1.0
        left = 1.0 if warm_up.shape == "step" else 1 - start / warm_up.for_s
        return 1 + (warm_up.factor - 1) * left

    def real_time(self, server_s: float) -> float:
        """Return the real time at which the server's clock shows ``server_s``; if that is a stall, the stall's end."""
        real = server_s
        for stall in self._law.stalls:
            if real >= stall.at_s:
                real += stall.for_s
        return real

    def server_time(self, real_s: float) -> float:
        """Return the server's clock at a real time."""
        return real_s - sum(min(max(real_s - stall.at_s, 0.0), stall.for_s) for stall in self._law.stalls)
