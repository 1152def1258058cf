"""Client libraries against a fleet: answers, streams, tools, silences, and a killed engine. `make test-clients` installs the libraries.

The code that makes each client is that of docs/api.md. The tests of a library are skipped where it is not installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import httpx
import pytest

from tests.clients.client import Library, each_library
from tests.clients.conftest import KEY
from tests.clients.programs.loop import NAME, SCHEMA, Command
from tests.clients.volley import Outcome, Watched, engine_of, play
from tests.e2e_fleet.operations import MODEL, Fleet

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PREFILL = "the quick brown fox jumps over the lazy dog " * 55
"""More than 1,000 tokens: half a second of prefill."""


@dataclass(frozen=True)
class Scenario:
    """What all clients ask at once. The engine is killed when each has had ``killed_after_events``; None: it is not killed."""

    case: str
    prompt: str
    killed_after_events: int | None = None
    max_tokens: int = 700
    """None of the answers is so long, but for that of ``silence``."""
    is_alike: bool = True
    """Whether all clients send the same prompt. If not, it begins with the client's name, so that nothing of it is in the prefix cache."""

    def command(self, name: str) -> Command:
        return Command(self.case, MODEL, self.prompt if self.is_alike else f"{name} {self.prompt}", self.max_tokens)


SCENARIOS = {
    "plain": Scenario("plain", "What is a scheduler?"),
    "stream": Scenario("stream", "What is a scheduler?"),
    "tools": Scenario("tools", "What is the weather?"),
    "silence": Scenario("stream", PREFILL, max_tokens=40, is_alike=False),
    "killed plain": Scenario("plain", "Write a poem about rain.", killed_after_events=0),
    "killed stream": Scenario("stream", "Sing a song.", killed_after_events=10),
    "killed tools": Scenario("tools", "What is the weather?", killed_after_events=20),
}
"""A request that was on two killed replicas is refused: no prompt of a killed engine is used twice."""
Play = Callable[[str], dict[str, Outcome]]


@pytest.fixture(scope="module")
def played(keyed: Fleet, clients: list[Watched]) -> Play:
    """Return a function that plays a scenario the first time that its name is given."""
    known: dict[str, dict[str, Outcome]] = {}

    def outcomes(name: str) -> dict[str, Outcome]:
        if name not in known:
            keyed.wait_for_replicas(1)
            scenario = SCENARIOS[name]
            kill = (lambda: None) if scenario.killed_after_events is None else engine_of(keyed)
            known[name] = play(clients, scenario.command, kill, after_events=scenario.killed_after_events)
        return known[name]

    return outcomes


@cache
def expected(url: str, command: Command) -> str:
    """Return the text of the fleet's own answer to the same question, without a client library."""
    question = {"role": "user", "content": command.prompt}
    body = {"model": command.model, "temperature": 0, "max_tokens": command.max_tokens, "messages": [question]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
    return str(answer.json()["choices"][0]["message"]["content"])


@each_library
@pytest.mark.parametrize("name", ["plain", "stream", "silence", "killed plain", "killed stream"])
def test_the_client_has_the_whole_text(library: Library, name: str, keyed: Fleet, played: Play) -> None:
    outcome = played(name)[library.name]
    assert outcome.answer["error"] == ""
    assert outcome.answer["text"] == expected(keyed.url, SCENARIOS[name].command(library.name))
    assert outcome.num_asked == 1  # the client has not tried again
    assert outcome.was_amid == name.startswith("killed")
    if name in ("silence", "killed stream"):
        assert outcome.num_comments > 0


@each_library
def test_the_client_calls_a_tool_and_gets_an_answer_to_its_result(library: Library, played: Play) -> None:
    outcome = played("tools")[library.name]
    assert (outcome.answer["error"], outcome.num_asked) == ("", 2)
    assert outcome.answer["text"]
    (call,) = outcome.answer["calls"]
    assert (call["name"], call["arguments"].keys()) == (NAME, SCHEMA["properties"].keys())


@each_library
def test_a_call_is_the_same_when_the_engine_is_killed_amid(library: Library, played: Play) -> None:
    undisturbed, outcome = played("tools")[library.name], played("killed tools")[library.name]
    assert outcome.answer == undisturbed.answer
    assert (outcome.num_asked, outcome.was_amid, outcome.num_comments > 0) == (2, True, True)
