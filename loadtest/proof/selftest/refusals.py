"""This check (T20) tests that refusals improve no figure: each refused request weighs as much as an answered one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from scipy import optimize, stats

from loadtest.control.saturate import probe_of, saturate, scenario_at
from loadtest.errors import ExitCode
from loadtest.judge.metrics import read_records
from loadtest.judge.search import Ask, Capacity, Probe, Search, SearchSettings
from loadtest.judge.window import Window
from loadtest.plan.scenario import parse_scenario
from loadtest.proof.many import answered, refused, sent_s, write_records
from loadtest.proof.selftest.bench import Bench, Point, judged, poisson
from loadtest.proof.selftest.estimates import holds
from loadtest.proof.truth.laws import Laws
from loadtest.proof.truth.settings import Law
from loadtest.records import Row, ScheduledRequest
from loadtest.wire.target import Target
from loadtest.wording import percentile

HALF: dict[str, Any] = {
    "ttft": {"law": "constant", "s": 0.05},
    "gap": {"law": "constant", "s": 0.004},
    "failures": [{"kind": "status", "status": 429, "every": 2}],
}
TOKENS = 256
"""Tokens of each answer. If a refused request had one infinite gap instead of 255, 99.6 % of the gaps would be inside the p99 limit."""
LIMITS = {"itl": "itl_p99=500ms", "ttft": "ttft_p99=2s"}


def t20_half(bench: Bench, metric: str) -> Iterator[Point]:
    """A server that refuses half of the requests keeps no limit by answering the other half well.

    Every second request is answered 429, and at least 99 % of the answered ones are inside the limit, which is on the ITL or the TTFT at
    p99: the run ends with exit status 1. A refused request, counted in the server's own log, is one infinite TTFT, and an infinite gap for
    each token of its 256 after the first.
    """
    scenario = poisson(20, 4 if bench.quick else 8, output_tokens=TOKENS, slo=LIMITS[metric])
    observed = bench.run(HALF, scenario)
    num, num_refused = len(observed.told), sum(entry.status == 429 for _, entry in observed.told)
    yield judged(f"{metric}: refused", f"{num_refused} of {num}", f"{num // 2}", num_refused == num // 2 > 0)
    records = read_records(observed.folder)
    (limit,), series = records.scenario.slo.limits, Window.of(records).series(metric)
    each = TOKENS - 1 if metric == "itl" else 1
    seen, expected = f"{series.num_failed} of {series.size} infinite", f"{num_refused * each} of {num * each}"
    ok = (series.num_failed, series.size) == (num_refused * each, num * each)
    yield judged(f"{metric}: weight", seen, expected, ok)
    good = series.attained(limit.limit_s) * series.size / max(1, series.size - series.num_failed)
    yield judged(f"{metric}: answered ones", f"{good:.2%} inside {limit}", ">= 99 %", good >= limit.quantile, timing=True)
    missed, invalid = (observed.code is code for code in (ExitCode.SLO_MISSED, ExitCode.INVALID))
    yield judged(f"{metric}: the run", f"exit status {observed.code:d}", "exit status 1", missed, timing=invalid)


SERVERS, Q, SEARCHED_TOKENS, GAP_S = 8, 0.9, 16, 0.004
SERVICE_S = (SEARCHED_TOKENS - 1) * GAP_S
FULL: dict[str, Any] = {
    "ttft": {"law": "constant", "s": 0},
    "gap": {"law": "constant", "s": GAP_S},
    "slots": SERVERS,
    "refuses_when_full": True,
}
SLO = f"itl_{percentile(Q)}=200ms"
MAX_OVER = 1.05
"""Limit of a found rate over the capacity. At 5 % above it, 11.5 % of the requests are refused; a search of this size can tell that
from 10 %."""


def blocked(servers: int, load: float) -> float:
    """Return the share of requests that find all servers busy (Erlang's B), at ``load`` arrivals per mean service time."""
    return float(stats.poisson.pmf(servers, load) / stats.poisson.cdf(servers, load))


def loss_capacity(servers: int, q: float) -> float:
    """Return the arrivals per mean service time of which a share ``q`` is answered."""
    return float(optimize.brentq(lambda load: blocked(servers, load) - (1 - q), 1e-6, 10.0 * servers))


def t20_capacity(bench: Bench, case: str) -> Iterator[Point]:
    """The capacity of a server that refuses what it has no room for ends where it refuses more than the limit allows.

    Eight slots of 60 ms and no queue: by Erlang's B formula 10 % of the requests are refused at 93/s. The limit is on the ITL at p90, and
    every answer keeps it. No search passes a rate more than 5 % above 93/s. Simulated: the interval holds 93/s in 9 of 10 searches (quick:
    2 of 2), with both ends and less than a factor of 2 between them; the probes are records of the server's law without a network. Real:
    one search by `saturate` that tries 0.7, 1 and 1.4 times that rate, and whose interval holds it with both ends.
    """
    truth = loss_capacity(SERVERS, Q) / SERVICE_S
    num = (2 if bench.quick else 10) if case == "simulated" else 1
    found = [simulated_search(bench, truth, seed) if case == "simulated" else _real_search(bench, truth) for seed in range(num)]
    winners = [capacity.winner or 0.0 for capacity in found]
    seen = f"at most {max(winners):.1f}/s passed"
    ok = max(winners) <= MAX_OVER * truth
    yield judged(f"{case}: never too high", seen, f"<= {MAX_OVER * truth:.1f}/s", ok)
    held = sum(holds(truth, c) if case == "simulated" else (c.low or truth) < truth < (c.high or 0.0) for c in found)
    least = num - num // 10
    shown = ", ".join(f"{c.low or 0:.0f}..{c.high or 0:.0f}/s" for c in found[:3])
    probes = sum(len(capacity.probes) for capacity in found)
    seen = f"{held} of {num} hold {truth:.1f}/s: {shown}; {probes} probes"
    yield judged(f"{case}: interval", seen, f">= {least}", held >= least, timing=case == "real")


def _scenario(rate: float) -> dict[str, Any]:
    return poisson(rate, 10, warmup_s=1, output_tokens=SEARCHED_TOKENS, slo=SLO)


def simulated_search(bench: Bench, truth: float, seed: int) -> Capacity:
    """Search with simulated probes; their records are judged like those of real probes."""
    short = SearchSettings(
        start_rate=0.6 * truth, quantiles=(Q,), step=0.1, max_requests=3000, num_confirm=1, max_probes=20, seed=1000 * seed
    )
    search = Search(short)
    folder = bench.new_folder()
    while (ask := search.next_rate()) is not None:
        search.add(_simulated_probe(ask, folder / f"probe-{len(search.probes):03d}"))
    return search.result()


def _simulated_probe(ask: Ask, folder: Path) -> Probe:
    laws = Laws(Law.model_validate(FULL), seed=ask.seed)
    write_records(folder, scenario_at(parse_scenario(_scenario(ask.rate)), ask), lambda request: _row(request, laws))
    return probe_of(ask, folder)


def _row(request: ScheduledRequest, laws: Laws) -> Row:
    """Return the row that the law server's answer would give."""
    at_s = sent_s(request)
    if laws.refuses(at_s):
        return refused(request)
    timing = laws.timing(str(request.id), arrival_s=at_s, num_chunks=request.output_tokens)
    return answered(request, [round((chunk_s - at_s) * 1e3, 3) for chunk_s in timing.sent_s])


def _real_search(bench: Bench, truth: float) -> Capacity:
    """Search as `saturate` does, with about ten probes at 0.7, 1.4 and 1 times the truth, and at half of 0.7 if that fails."""
    short = SearchSettings(start_rate=0.7 * truth, quantiles=(Q,), step=0.5, max_requests=3000, num_confirm=1, max_probes=12)
    with bench.serving(FULL) as (folder, url):
        saturate(parse_scenario(_scenario(truth)), Target(url), folder / "search", short, command=(), say=lambda _: None)
    return msgspec.json.decode((folder / "search" / "saturate.json").read_bytes(), type=Capacity)
