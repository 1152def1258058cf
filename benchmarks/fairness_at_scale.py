"""This benchmark measures fairness between 200 tenants on 1,000 simulated engines behind 20 ingresses, and what a decision costs.

    python -m benchmarks.fairness_at_scale [--engines 1000 --tenants 200 --ingresses 20] [--seconds 140] [--seed 1]

Demand follows Zipf's law and is 1.5 times what the engines compute. Tenants have the weights 1, 2 and 4, requests of four shapes, and use
1, 3 or all ingresses. A tenant that wants more than twice its share always has requests that wait: it is *backlogged*. One that wants less
than half of its share is *light*. One tenant in the middle, the *noisy* one, wants ten times its share. One in 20 messages to and from the
board is lost.

The bound. Let `level` be the GPU-seconds per second and unit of weight that backlogged tenants get. For two backlogged tenants i and j and
any interval, |served_i / w_i - served_j / w_j| <= lag_i + lag_j, where, with start-time fair queueing at `ingresses` places,

    lag = ingresses * cost / w      each ingress orders whole requests: Goyal's bound, once per ingress
        + level * exchange_s        what waits elsewhere is known as it was one exchange ago; here it may double or halve meanwhile
        + level * answer_s          requests in slots are not taken back (SFQ(D) of Jin, Chase, Kaur 2004: D requests are in service)
        + level * spread_s          each engine has a queue of its own: the longest minus the shortest wait of a backlogged tenant

`cost` is the largest of the tenant's requests, `answer_s` the longest time of one in its slot. `spread_s` is measured.
"""

import argparse
import heapq
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.fairness_fleet import COSTS, DELAY_S, EXCHANGE_S, NUM_SLOTS, SAMPLE_S, Client, FairFleet, Faults
from serve_app.core.fair_order import FairOrder
from serve_app.core.request import RequestState, Resume

Array = NDArray[np.float64]

SHAPES = [(600, 150), (4000, 150), (1000, 700), (8000, 100)]
"""Tokens of prompt and answer."""
ZIPF = 0.8
LOAD = 1.5
NOISE = 10.0
WARM_UP_SHARE = 0.5
LOSSES = Faults()


@dataclass(frozen=True)
class Scale:
    """The size of a run."""

    engines: int = 1000
    tenants: int = 200
    ingresses: int = 20
    seconds: float = 140.0
    seed: int = 1


@dataclass(frozen=True)
class Demand:
    """All tenants, and what each gets if shares are exact."""

    clients: list[Client]
    backlogged: list[int]
    light: list[int]
    noisy: int
    level: float
    """GPU-seconds per second and unit of weight of backlogged tenants, if no prompt is cached."""

    def late(self, begins_at: float) -> "Demand":
        """Return the same demand with a noisy tenant that comes anew at a time, and is not counted."""
        clients = list(self.clients)
        clients[self.noisy] = replace(clients[self.noisy], begins_at=begins_at)
        return replace(self, clients=clients, backlogged=[n for n in self.backlogged if n != self.noisy])


def demand_of(scale: Scale, *, noise: float = NOISE) -> Demand:
    """Return the tenants. The one in the middle asks for ``noise`` times its share, and with 1 for its share."""
    rng = random.Random(scale.seed)
    weights = [(1.0, 2.0, 4.0)[number % 3] for number in range(scale.tenants)]
    zipf = [(number + 1) ** -ZIPF for number in range(scale.tenants)]
    wanted = [LOAD * scale.engines * each / sum(zipf) for each in zipf]
    noisy = scale.tenants // 2
    for _ in range(20):  # its share depends on the level, and the level on its demand
        level = _level(wanted, weights, float(scale.engines))
        wanted[noisy] = noise * level * weights[noisy]
    clients = []
    for number, (want, weight) in enumerate(zip(wanted, weights, strict=True)):
        prompt, output = SHAPES[rng.randrange(len(SHAPES))]
        cost_s = prompt * COSTS.prompt_token_s + output * COSTS.output_token_s
        places = tuple(rng.sample(range(scale.ingresses), min(scale.ingresses, (1, 3, scale.ingresses)[rng.randrange(3)])))
        is_backlogged = want > 2 * level * weight
        num_open = round(NUM_SLOTS * want) if is_backlogged else 0
        clients.append(Client(f"t{number}", weight, prompt, output, num_open, 0.0 if is_backlogged else want / cost_s, places))
    backlogged = [n for n, client in enumerate(clients) if client.num_open]
    light = [n for n in range(scale.tenants) if wanted[n] < 0.5 * level * weights[n]]
    return Demand(clients, backlogged, light, noisy, level)


def _level(wanted: Sequence[float], weights: Sequence[float], capacity: float) -> float:
    """Return the level at which the tenants take all of the capacity, none of them more than it wants."""
    low, high = 0.0, capacity
    for _ in range(60):
        level = (low + high) / 2
        taken = sum(min(want, level * weight) for want, weight in zip(wanted, weights, strict=True))
        low, high = (level, high) if taken < capacity else (low, level)
    return low


@dataclass(frozen=True)
class Figures:
    """The figures of one run, of the time after the warm-up."""

    jain: float
    """Jain's index of served / weight over the backlogged tenants: 1 if all are equal."""
    worst_s: float
    """The largest |served_i / w_i - served_j / w_j| over all pairs and intervals, in GPU-seconds."""
    bound_s: float
    """The bound of the pair that comes nearest to its own."""
    of_bound: float
    """What this pair has of its bound."""
    least: float
    """served / weight over its mean, of the backlogged tenant with the least; ``most`` of the one with the most."""
    most: float
    used: float
    """Share of the engines' time in use."""
    per_s: float
    """Ended requests per second."""
    light_p50_s: float
    """Time to first token of light tenants."""
    light_p99_s: float
    hits: float
    """Share of prompt tokens that ingresses expected in caches, since the start."""
    cached: float
    """Share of prompt tokens that were in caches."""
    least_of_5: float
    """The least that a backlogged tenant got in any 5 seconds, of its share of that time."""
    told: tuple[float, float, float]
    """Expected wait over true one for backlogged tenants: the 10th, 50th and 90th percentile."""

    def row(self) -> str:
        cells = [
            f"{self.jain:.4f}",
            f"{self.least:.2f} to {self.most:.2f}",
            f"{self.worst_s:.0f}",
            f"{100 * self.of_bound:.0f} % of {self.bound_s:.0f}",
            f"{self.least_of_5:.2f}",
            f"{100 * self.used:.1f} %",
            f"{self.per_s:.0f}",
            f"{self.light_p50_s:.2f}, {self.light_p99_s:.2f}",
            f"{100 * self.hits:.1f}, {100 * self.cached:.1f} %",
            " ".join(f"{each:.2f}" for each in self.told),
        ]
        return " | ".join(cells)


HEAD = (
    "Jain | served / share | widest pair GPU-s/w | nearest to its bound | least of any 5 s | engines in use | requests/s "
    "| light TTFT p50, p99 s | hits expected, true | told wait / true p10 p50 p90"
)


def played(scale: Scale, demand: Demand, *, is_fair: bool = True, faults: Faults = LOSSES) -> FairFleet:
    """Run the demand once."""
    fleet = FairFleet(
        demand.clients,
        num_engines=scale.engines,
        num_ingresses=scale.ingresses,
        seed=scale.seed,
        is_fair=is_fair,
        faults=faults,
    )
    fleet.run(scale.seconds)
    for each in fleet.fleets:
        each.validate()
    return fleet


def figures(fleet: FairFleet, demand: Demand, scale: Scale) -> Figures:
    """Return the figures of a run."""
    begun = WARM_UP_SHARE * scale.seconds
    samples = [sample for sample in fleet.samples if sample[0] >= begun]
    weights = np.array([client.weight for client in demand.clients])
    served = np.array([sample[1] for sample in samples])
    gained = served[-1] - served[0]
    lasted = samples[-1][0] - samples[0][0]
    each = (gained / weights)[demand.backlogged]
    asks = [ask for ask in fleet.ended if ask.first_at is not None and ask.arrived_at >= begun]
    light = set(demand.light)
    ttft_s = [ask.first_at - ask.arrived_at for ask in asks if ask.tenant in light and ask.first_at is not None]
    backlogged = set(demand.backlogged)
    told = [
        a.told_s / (a.first_at - a.arrived_at) for a in asks if a.tenant in backlogged and a.told_s is not None and a.first_at
    ]
    level = float(gained[demand.backlogged].sum() / weights[demand.backlogged].sum()) / lasted
    bounds = lags(fleet, demand, begun, level)
    worst_s, bound_s, of_bound = widest(served[:, demand.backlogged] / weights[demand.backlogged], bounds)
    shares = each / (level * lasted)
    return Figures(
        jain=float(each.sum() ** 2 / (len(each) * (each**2).sum())),
        worst_s=worst_s,
        bound_s=bound_s,
        of_bound=of_bound,
        least=float(shares.min()),
        most=float(shares.max()),
        used=float(gained.sum()) / (scale.engines * lasted),
        per_s=sum(begun <= ask.ends_at for ask in fleet.ended) / (scale.seconds - begun),
        light_p50_s=float(np.quantile(ttft_s, 0.5)),
        light_p99_s=float(np.quantile(ttft_s, 0.99)),
        hits=fleet.expected_hit_tokens / sum(ask.prompt_tokens for ask in [*fleet.ended, *fleet.open.values()]),
        cached=sum(ask.cached_tokens for ask in asks) / sum(ask.prompt_tokens for ask in asks),
        least_of_5=least_of(served[:, demand.backlogged] / weights[demand.backlogged], 5.0) / (5.0 * level),
        told=tuple(np.quantile(told, [0.1, 0.5, 0.9])) if told else (0.0, 0.0, 0.0),
    )


def lags(fleet: FairFleet, demand: Demand, begun: float, level: float) -> Array:
    """Return the lag of each backlogged tenant, as the text at the top has it."""
    found = []
    for number in demand.backlogged:
        client = demand.clients[number]
        asks = [ask for ask in (*fleet.ended, *fleet.open.values()) if ask.tenant == number]
        waits_s = [ask.started_at - ask.arrived_at for ask in asks if ask.started_at is not None and ask.started_at >= begun]
        so_far_s = [fleet.now - ask.arrived_at for ask in asks if ask.started_at is None]
        cost_s = max(ask.cost_s for ask in asks)
        spread_s = max(waits_s + so_far_s) - min(waits_s, default=0.0)
        late_s = EXCHANGE_S + 2 * DELAY_S + NUM_SLOTS * cost_s + spread_s
        found.append(len(client.ingresses) * cost_s / client.weight + level * late_s)
    return np.array(found)


def widest(normalized: Array, lag: Array) -> tuple[float, float, float]:
    """Return the widest difference of a pair over any interval; and of the pair nearest to its bound, the bound and the share of it.

    Args:
        normalized: GPU-seconds over weight, by time and tenant.
        lag: Of each tenant.
    """
    worst_s, bound_s, of_bound = 0.0, 0.0, 0.0
    for one, other in itertools.combinations(range(normalized.shape[1]), 2):
        difference = normalized[:, one] - normalized[:, other]
        width, bound = float(difference.max() - difference.min()), float(lag[one] + lag[other])
        worst_s = max(worst_s, width)
        if width / bound > of_bound:
            bound_s, of_bound = bound, width / bound
    return worst_s, bound_s, of_bound


def least_of(normalized: Array, seconds: float) -> float:
    """Return the least that any tenant gained in any interval of this length."""
    num = round(seconds / SAMPLE_S)
    return float((normalized[num:] - normalized[:-num]).min())


def cost_of_order(num_tenants: int, num_waiting: int, num_requests: int) -> float:
    """Return the CPU microseconds that `FairOrder` takes per request, for place, begin and end."""
    order, rng = FairOrder(), random.Random(1)
    order.learn(COSTS)
    order.note_queue("engine", 1)
    order.note_fullness(1, None, 0.0)
    requests = [RequestState(str(n), rng.randrange(100, 4000), 400, Resume.CONTINUE) for n in range(num_waiting + num_requests)]
    for request in requests:
        request.emitted_ids, request.attempt = [0] * 100, 0
    tenants = [f"t{min(rng.randrange(num_tenants), rng.randrange(num_tenants))}" for _ in requests]
    waiting: list[tuple[int, int, RequestState]] = []
    used_s = 0.0
    for number, (request, tenant) in enumerate(zip(requests, tenants, strict=True)):
        now = number / 1000
        started = time.thread_time()
        order.place(request, tenant, 1.0, "interactive", now)
        used_s += (time.thread_time() - started) * (number >= num_waiting)
        heapq.heappush(waiting, (request.priority, number, request))
        if number >= num_waiting:
            request = heapq.heappop(waiting)[2]
            started = time.thread_time()
            order.begin(request, now)
            order.end(request, now)
            used_s += time.thread_time() - started
    return 1e6 * used_s / num_requests


def cost_of_arrivals(fleet: FairFleet, num: int) -> tuple[float, float]:
    """Return the CPU microseconds of `FleetState.handle(RequestArrived)` in a fleet as it is: the median and the 99th percentile."""
    times_s = []
    for number in range(num):
        ask = fleet.ask_of(number % len(fleet.clients), number % len(fleet.fleets))
        state, event = fleet.fleets[ask.ingress], fleet.arrival_of(ask)
        started = time.thread_time()
        state.handle(event, now=fleet.now)
        times_s.append(time.thread_time() - started)
    return float(1e6 * np.quantile(times_s, 0.5)), float(1e6 * np.quantile(times_s, 0.99))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("engines", "tenants", "ingresses", "seconds", "seed"):
        parser.add_argument(f"--{name}", type=type(getattr(Scale, name)), default=getattr(Scale, name))
    scale = Scale(**vars(parser.parse_args()))
    demand, quiet = demand_of(scale), demand_of(scale, noise=1.0)
    busiest, middle = demand.clients[0].ingresses[0], 0.6 * scale.seconds
    cut = (busiest, middle - 10, middle + 20)
    cases = {
        "fair": (demand, True, LOSSES),
        "fair, the noisy one asks for its share": (quiet, True, LOSSES),
        "first come first served": (demand, False, LOSSES),
        "fair, an ingress starts anew": (demand, True, Faults(restart=(busiest, middle))),
        "fair, an ingress without the board for 30 s": (demand, True, Faults(cut=cut)),
        "fair, the noisy one begins in the middle": (demand.late(middle), True, LOSSES),
    }
    print(f"{scale}: {len(demand.backlogged)} tenants backlogged, {len(demand.light)} light; level {demand.level:.2f} GPU-s/s")
    print(f"| run | {HEAD} |\n|{'---|' * 11}")
    for name, (asked, is_fair, faults) in cases.items():
        fleet = played(scale, asked, is_fair=is_fair, faults=faults)
        print(f"| {name} | {figures(fleet, asked, scale).row()} |", flush=True)
        if name == "fair":
            arrivals = cost_of_arrivals(fleet, 4000)
    print(f"FairOrder, {scale.tenants} tenants, 5,000 waiting: {cost_of_order(scale.tenants, 5000, 20_000):.1f} us per request")
    print(f"FleetState.handle(RequestArrived): p50 {arrivals[0]:.1f} us, p99 {arrivals[1]:.1f} us")


if __name__ == "__main__":
    main()
