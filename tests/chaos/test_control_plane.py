"""Serve's controller, the lease board and an ingress are killed under streams and new requests. Two models, two ingresses, simulated.

It sleeps before a fault: the fault comes at a random moment of the load, which the seed chooses.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.chaos.records import audit, is_there, seeds
from tests.e2e.fleet import wait_until
from tests.e2e_fleet.conftest import Configure
from tests.e2e_fleet.operations import MODEL, Fleet, fleet, is_running, titled
from tests.e2e_fleet.streams import Answer, Load, Volley, completion, play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

PORT = 8064
QUIET = "quiet"
HEALED_LIMIT_S = 120.0  # of a busy machine; the records keep what was seen
NUM_INGRESSES = 2
NUM_STREAMS = 4
BOARD, CONTROLLER = "ray::LeaseBoard", "ray::ServeController"
TITLES = {"board-killed": BOARD, "controller-killed": CONTROLLER}
FIRST_REQUEST, INGRESS_KILLED = "first-request-to-a-model", "ingress-killed"


@pytest.fixture(scope="module", params=seeds())
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def pair(seed: int, configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet for each seed: one of its models must have had no request."""
    if all(is_there(scenario, seed) for scenario in (*TITLES, FIRST_REQUEST, INGRESS_KILLED)):
        pytest.skip("all records of this seed are there")
    config = configure(
        PORT,
        replicas={"min": 2, "max": 2},
        timeouts={"drain_s": 5.0, "stream_silence_s": 60.0},
        simulated={"profile": "a10g-llama-8b"},
        num_ingresses=NUM_INGRESSES,
    )
    config["models"][QUIET] = {**config["models"][MODEL], "replicas": {"min": 1, "max": 1}}
    with fleet(config, tmp_path_factory.mktemp("pair")) as running:
        yield running


def heirs(pair: Fleet, title: str, victims: list[psutil.Process], *, count: int = 1) -> bool:
    """Whether as many processes of that title run as there were, none of them a victim."""
    return len([p for p in titled(pair.family(), title) if is_running(p) and p not in victims]) == count


@pytest.mark.parametrize(("scenario", "title"), TITLES.items(), ids=TITLES)
def test_no_request_notices_that_the_control_plane_is_killed(pair: Fleet, scenario: str, title: str, seed: int) -> None:
    if is_there(scenario, seed):
        pytest.skip("its record is there")
    chosen = random.Random(seed)
    ask = completion(MODEL, prompt=f"{chosen.randrange(1000)} the quick brown fox", max_tokens=100)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    victim = pair.process(title)
    with Load(pair.url, ask, num_streams=NUM_STREAMS) as load:
        time.sleep(chosen.uniform(1.0, 4.0))
        victim.kill()
        killed_at = time.monotonic()
        wait_until(lambda: heirs(pair, title, [victim]), limit_s=HEALED_LIMIT_S, what=f"another {title}\n{pair.server.tail()}")
        healed_s = time.monotonic() - killed_at
        before = len(load.answers)
        wait_until(lambda: len(load.answers) >= before + 2 * NUM_STREAMS, limit_s=HEALED_LIMIT_S, what="answers after it")
    record = audit(scenario, seed, load.answers, undisturbed, healed_s=healed_s, at_most={"healed_s": 20.0})
    assert record.n >= 2 * NUM_STREAMS


def test_the_first_requests_to_a_model_are_answered_while_board_and_controller_are_dead(pair: Fleet, seed: int) -> None:
    """Both are stopped before they are killed: Ray would have started them again before the answers are complete."""
    if is_there(FIRST_REQUEST, seed):
        pytest.skip("its record is there")
    prompt = f"{random.Random(seed).randrange(1000)} jumps over the lazy dog"
    undisturbed = play(pair.url, [completion(MODEL, prompt=prompt, max_tokens=50)])[0]
    assert undisturbed.is_complete()
    victims = {title: pair.process(title) for title in TITLES.values()}
    for victim in victims.values():
        victim.suspend()
    answers = play(pair.url, [completion(QUIET, prompt=prompt, max_tokens=50)] * 2 * NUM_INGRESSES)
    for victim in victims.values():
        victim.kill()
    killed_at = time.monotonic()
    for title, victim in victims.items():
        wait_until(lambda t=title, v=victim: heirs(pair, t, [v]), limit_s=HEALED_LIMIT_S, what=f"another {title}")  # type: ignore[misc]
    audit(FIRST_REQUEST, seed, answers, undisturbed, healed_s=time.monotonic() - killed_at)


def held_by(ingress: psutil.Process) -> int:
    """Return how many clients are connected to it."""
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port == PORT for c in ingress.net_connections("tcp"))


def num_cut(answers: list[Answer]) -> int:
    return sum(answer.cut for answer in answers)


def is_forgotten(pair: Fleet) -> bool:
    """Whether the replicas compute only requests of the ingress that answers."""
    series = pair.ingresses()[0]
    held, running, waiting = (
        sum(value for (name, _), value in series.items() if name == f"serve_app_replica_{gauge}")
        for gauge in ("held", "running", "waiting")
    )
    return held == running + waiting


def test_an_ingress_that_is_killed_costs_its_clients_one_reconnect_and_nobody_else_anything(pair: Fleet, seed: int) -> None:
    if is_there(INGRESS_KILLED, seed):
        pytest.skip("its record is there")
    ask = completion(MODEL, prompt=f"{random.Random(seed).randrange(1000)} the quick brown fox", max_tokens=400)
    undisturbed = play(pair.url, [ask])[0]
    assert undisturbed.is_complete()
    title = f"ray::ServeReplica:{pair.name}:ingress"
    ingresses = titled(pair.family(), title)
    assert len(ingresses) == NUM_INGRESSES
    volley = Volley(pair.url, [ask] * 2 * NUM_STREAMS)
    again: list[Answer] = []
    victims: dict[psutil.Process, float] = {}

    def kill_the_busier() -> None:
        victim = max(ingresses, key=held_by)
        num_clients = held_by(victim)
        victim.kill()
        victims[victim] = time.monotonic()
        wait_until(lambda: num_cut(volley.answers) == num_clients, limit_s=HEALED_LIMIT_S, what="its clients' cut", every_s=0.01)
        with ThreadPoolExecutor() as pool:
            reconnected = pool.submit(play, pair.url, [ask] * num_clients)
            wait_until(lambda: is_forgotten(pair), limit_s=HEALED_LIMIT_S, what="the dead one's requests aborted")
            assert not all(a.ended for a in volley.answers), "they ended by themselves"
            again.extend(reconnected.result())

    answers = asyncio.run(volley.play(kill_the_busier))
    wait_until(lambda: heirs(pair, title, [*victims], count=NUM_INGRESSES), limit_s=HEALED_LIMIT_S, what="another ingress")
    pair.wait_until_ready()
    ((_, killed_at),) = victims.items()
    healed_s = time.monotonic() - killed_at
    whole = [*(a for a in answers if not a.cut), *again]
    record = audit(INGRESS_KILLED, seed, whole, undisturbed, healed_s=healed_s, measured={"reconnects": num_cut(answers)})
    assert 0 < record.measured["reconnects"] == len(again)
