"""`serve-app up` reports what happens while the fleet serves."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve

from serve_app.cli import up
from serve_app.cli.cluster import RunState
from serve_app.config import parse_settings
from serve_app.errors import ClusterFailed, ClusterSilent, FrontEndStartFailed
from serve_app.membership import board_name

SETTINGS = parse_settings({"models": {"a": {"model": "some/model"}}})
OTHERS = ["SERVE_CONTROLLER_ACTOR", "SERVE_REPLICA::serve-app-2#ingress#i1"]
SILENT = ClusterSilent(problem="Ray has not answered for 30 s", hint="")


@dataclass
class Status:
    """As Serve's own of an application."""

    status: str = "RUNNING"
    message: str = ""
    deployments: dict[str, Any] = field(default_factory=dict)


def watch(monkeypatch: pytest.MonkeyPatch, *answers: Status | ClusterFailed) -> None:
    """Watch while Serve gives these answers, then be told to stop."""
    stop = threading.Event()
    given = iter(answers)
    monkeypatch.setattr(up, "_WATCH_S", 0.0)
    monkeypatch.setattr(up, "application_status", lambda name: next_answer(given, stop.set))
    up._watch(SETTINGS, stop)
    assert list(given) == []


def next_answer(given: Iterator[Status | ClusterFailed], end: Callable[[], None]) -> Status:
    answer = next(given, None)
    if answer is None:
        end()
        return Status()
    if isinstance(answer, ClusterFailed):
        raise answer
    return answer


def test_a_control_plane_that_does_not_answer_ends_nothing_and_is_told_once_each_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(monkeypatch, Status(), SILENT, SILENT, Status(), SILENT)
    said = "Ray has not answered for 30 s: running replicas continue, and nothing is replaced until Ray answers"
    assert " ".join(capsys.readouterr().err.split()) == f"{said} {said}"


def test_each_change_of_the_tenants_file_is_one_line_whatever_it_led_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ingress(at: int, said: str, *, is_whole: bool = True) -> dict[str, Any]:
        return {"role": "ingress", "load": {"tenants_file_in_force": is_whole, "tenants_file_change": (at, said)}}

    stop = threading.Event()
    settings = parse_settings({"models": {"a": {"model": "some/model"}}, "ingress": {"tenants_file": "/tenants.yaml"}})
    older: dict[str, Any] = {"role": "ingress", "load": {}}
    unchanged, good, again = ingress(0, ""), ingress(1, "4 keys are in force"), ingress(4, "4 keys are in force")
    bad, worse = (ingress(at, f"mistake {at}", is_whole=False) for at in (2, 3))
    looks = iter(
        [[older], [unchanged], [good, unchanged], [bad, good], [bad], [], [{"role": "replica", "load": {}}], [worse], [again]]
    )

    def members(name: str) -> list[dict[str, Any]]:
        if (found := next(looks, None)) is None:
            stop.set()
        return found or []

    monkeypatch.setattr(up, "_WATCH_S", 0.0)
    monkeypatch.setattr(up, "application_status", lambda name: Status())
    monkeypatch.setattr(up, "members", members)
    up._watch(settings, stop)
    lines = ["4 keys are in force", "mistake 2", "mistake 3", "4 keys are in force"]
    assert capsys.readouterr().err.splitlines() == lines


def test_an_update_that_serve_gave_up_ends_nothing_while_an_ingress_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ingress = SimpleNamespace(message="", replica_states={"RUNNING": 1})
    model = SimpleNamespace(message="no memory", replica_states={"RUNNING": 1})
    failed = Status("DEPLOY_FAILED", "", {"ingress": ingress, "replica-a": model})
    watch(monkeypatch, Status(), *[failed] * 4, Status())  # each look at a failed one asks twice
    assert (
        capsys.readouterr().err == "an update has failed, and the replicas that served before continue:\nreplica-a: no memory\n"
    )


def test_an_application_that_serve_gave_up_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterFailed, match="did not come up; serve-app: no memory"):
        watch(monkeypatch, Status(), Status("DEPLOY_FAILED", "no memory"))


def test_a_start_that_says_nothing_new_says_from_time_to_time_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("serve_app.cli.up.time.monotonic", lambda: now[0])
    progress = up._ProgressLines()
    for now[0], line in ((100.5, "1 starting"), (101.0, "1 starting"), (116.0, "1 starting"), (117.0, "1 running")):
        progress.show(line)
    assert capsys.readouterr().err.splitlines() == ["  1 starting", "  1 starting (16 s)", "  1 running"]


def start(monkeypatch: pytest.MonkeyPatch, *answers: Status | ClusterFailed) -> None:
    """Wait for the start of an application whose Serve gives these answers and then says that all runs."""
    given = iter(answers)
    monkeypatch.setattr(up, "_POLL_S", 0.0)
    monkeypatch.setattr("serve_app.cli.up.time.monotonic", lambda: 100.0)  # so that no line is told again with the seconds so far
    monkeypatch.setattr(up, "application_status", lambda name: next_answer(given, lambda: None))
    up._wait_ready(SETTINGS, "", threading.Event())


def test_a_start_outlives_a_control_plane_that_is_slow_to_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start(monkeypatch, SILENT, SILENT, SILENT, Status("DEPLOYING"), Status("DEPLOYING"), SILENT)
    said = "  Ray has not answered for 30 s, which happens on a busy machine; waiting"
    assert capsys.readouterr().err.splitlines() == [said, "  waiting for Ray Serve", said, "ready after 0 s"]


def test_a_start_ends_when_the_control_plane_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterSilent):
        start(monkeypatch, *[SILENT] * up._MAX_SILENCES)


def test_a_front_end_that_did_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = FrontEndStartFailed("a", "User-specified max_model_len (20480) is greater")
    message = "".join(traceback.format_exception(failed))
    status = Status("DEPLOY_FAILED", "failed", {"ingress": SimpleNamespace(message=message, replica_states={})})
    monkeypatch.setattr(up, "application_status", lambda name: status)
    with pytest.raises(ClusterFailed) as refused:
        up._check_application(SETTINGS)
    assert str(refused.value) == f"the application did not come up; ingress: {failed}"


def test_a_stop_names_what_is_left_and_nothing_when_nothing_is() -> None:
    stopping = SimpleNamespace(message="", replica_states={"STOPPING": 2})
    assert up._states(Status(deployments={"replica-a": stopping})) == "replica-a 2 stopping"
    assert up._states(Status()) == ""


@pytest.mark.parametrize(("address", "url"), [("", "http://127.0.0.1:8010"), ("10.0.0.1:6379", "")])
def test_later_commands_find_a_url_only_where_the_ingress_is_on_this_machine(
    address: str, url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a cluster that ran before, the ingress may be elsewhere, and what answers at that URL here may be another fleet."""
    file, found = tmp_path / "fleet.yaml", list[RunState | None]()
    file.write_text("models: {a: {model: some/model}}")
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(up, "_cluster", lambda *_: contextlib.nullcontext(address or "127.0.0.1:6379"))
    for step in ("deploy", "_wait_ready", "remove"):
        monkeypatch.setattr(up, step, lambda *_, **__: None)
    monkeypatch.setattr(up, "_watch", lambda settings, stop: found.append(RunState.load(settings.name)))
    up.up(file, address)
    assert [(run.ray_address, run.url) for run in found if run] == [(address or "127.0.0.1:6379", url)]
    assert RunState.load("serve-app") is None


@pytest.mark.parametrize(
    ("signals", "cuts"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
def test_only_a_ctrl_c_after_another_signal_cuts_streams(
    signals: list[signal.Signals], cuts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`serve-app down` sends SIGTERM, and may be given twice."""
    file, found = tmp_path / "fleet.yaml", list[tuple[bool, bool]]()
    file.write_text("models: {a: {model: some/model}}")
    monkeypatch.setenv("SERVE_APP_CACHE", str(tmp_path))
    monkeypatch.setattr(up, "_cluster", lambda *_: contextlib.nullcontext("10.0.0.1:6379"))
    for step in ("deploy", "_wait_ready"):
        monkeypatch.setattr(up, step, lambda *_: None)
    stops = list[threading.Event]()

    def watch_and_get(settings: Any, stop: threading.Event) -> None:
        stops.append(stop)
        for number in signals:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(up, "_watch", watch_and_get)
    monkeypatch.setattr(up, "remove", lambda settings, cut, *, here: found.append((stops[0].is_set(), cut.is_set())))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        up.up(file, "10.0.0.1:6379")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert found == [(True, cuts)]


def members_of(actors: list[str]) -> list[str]:
    return [name for name in actors if name.startswith("SERVE_REPLICA::serve-app#")]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The actors of a cluster: an ingress, a replica that drains, their board, which a member that lives would make anew, and others'."""
    board = board_name("serve-app")
    found = ["SERVE_REPLICA::serve-app#ingress#i1", "SERVE_REPLICA::serve-app#replica-a#r1", board, *OTHERS]

    def end(name: str) -> None:
        found.remove(name)
        if name == board and members_of(found):
            found.append(board)

    monkeypatch.setattr(up, "_POLL_S", 0.0)
    monkeypatch.setattr(
        "ray.util.list_named_actors", lambda all_namespaces: [{"namespace": "serve", "name": name} for name in found]
    )
    monkeypatch.setattr(serve, "delete", lambda name, _blocking: None)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(ray, "kill", end)
    return found


@pytest.mark.parametrize("slow", [[], ["SERVE_REPLICA::serve-app#replica-a#r1"]], ids=["at once", "one dies late"])
def test_a_second_ctrl_c_leaves_nothing_on_a_cluster_that_ran_before(
    slow: list[str], actors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, end = threading.Event(), ray.kill
    cut.set()

    def kill(name: str) -> None:
        if name in slow:
            slow.remove(name)  # the first kill has not reached its node yet
        else:
            end(name)

    monkeypatch.setattr(ray, "kill", kill)
    monkeypatch.setattr(up, "application_status", lambda name: Status("DELETING") if members_of(actors) else None)
    up.remove(SETTINGS, cut, here=False)
    assert actors == OTHERS


def test_a_second_ctrl_c_leaves_all_to_the_end_of_a_cluster_of_its_own(
    actors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = threading.Event()
    cut.set()
    monkeypatch.setattr(up, "application_status", lambda name: Status("DELETING"))
    up.remove(SETTINGS, cut, here=True)
    assert len(actors) == 3 + len(OTHERS)


@pytest.mark.parametrize("here", [True, False])
def test_a_board_is_removed_after_a_drain(here: bool, actors: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    del actors[:2]
    states = iter([Status("DELETING"), None])
    monkeypatch.setattr(up, "application_status", lambda name: next(states))
    up.remove(SETTINGS, threading.Event(), here=here)
    assert actors == OTHERS
