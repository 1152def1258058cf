import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from serve_app.application import serve_config
from serve_app.autoscaling.decision_log import Record
from serve_app.autoscaling.fleet import FleetObservation, FleetRules, FleetScaler, IngressObservation
from serve_app.autoscaling.signals import ModelLoad
from serve_app.cli import autoscale
from serve_app.cli.decision_text import WISHES, explanation
from serve_app.cli.main import app
from serve_app.config import parse_settings
from serve_app.core.step_costs import MeasuredCosts
from serve_app.errors import DecisionLogError
from tests.autoscaling.plant import RULES, TIMES, Plant
from tests.autoscaling.queue_plant import QueuePlant, rate_of
from tests.autoscaling.test_start_costs import measured_of

START = 1_790_000_000.0  # 2026-09-21T14:13:20Z


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten minutes, the load doubles in their midst; an ingress falls silent at the end."""
    plant, scaler = Plant(running=2, maximum=9), FleetScaler(FleetRules(models={"chat": RULES}))
    lines = []
    adapter = TypeAdapter(Record)
    for number in range(600):
        model = plant.see(plant.load(10.0 if number < 300 else 20.0))
        silent = ("ingress-2",) if number > 590 else ()
        ingress = IngressObservation(
            running=1, target=1, minimum=1, maximum=2, streams=3.0, cpu_s=0.1, interval_s=1.0, silent=silent
        )
        seen = FleetObservation(at=plant.at, models={"chat": model}, ingress=ingress)
        before = FleetScaler(scaler.rules) if number == 0 else None
        decided = scaler.observe(seen)
        plant.obey(decided["chat"])
        record = Record(number=number, time=START + number, seen=seen, decided=decided, scaler=before)
        lines.append(adapter.dump_json(record, exclude_defaults=True, by_alias=True).decode())
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_text("\n".join([*lines, ""]))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["autoscale", *map(str, arguments)], env={"COLUMNS": "100"})


def test_log_lists_changes_alone(log: Path) -> None:
    lines = run("log", "-f", log).stdout.splitlines()
    assert lines[0].split() == ["time", "model", "replicas", "rule", "demand", "queue", "ready", "in"]
    assert len(lines) > 1
    for line in lines[1:]:
        assert re.match(r"2026-09-21T14:\d\d:\d\dZ  chat   \d -> \d ", line), line
    assert run("log", "-f", log, "--model", "(ingresses)").stdout.startswith("no change in 2026-09-21T14:13:20Z to")
    assert run("log", "-f", log, "--json").stdout == log.read_text()


def test_explain_says_what_a_decision_was_made_from(log: Path) -> None:
    change = re.search(r"(\S+Z)  chat   (\d) -> (\d) +(demand|queue|growth)", run("log", "-f", log).stdout)
    assert change is not None
    time, before, after, rule = change.groups()
    text = run("explain", "-f", log, "--at", time, "--model", "chat").stdout
    assert text.startswith(f"chat, {time}: {before} -> {after}, because {WISHES[rule]}\n")
    for part in ("serve", "demand", "measured", "a step takes", "may be busy", f"{rule} {after}", "1 to 9", "cold start of"):
        assert part in text, text
    both = run("explain", "-f", log).stdout
    assert "\n\nchat, 2026-09-21T14:23:19Z: stays at" in both
    assert both.startswith(
        "(ingresses), 2026-09-21T14:23:19Z: stays at 1, because no more is wanted, and the configuration allows no fewer\n"
    )
    assert "silent    ingress-2" in both


def test_explain_prints_the_decision_itself_as_json(log: Path) -> None:
    told = json.loads(run("explain", "-f", log, "--model", "chat", "--json").stdout)
    words = run("explain", "-f", log, "--model", "chat").stdout
    assert (set(told["decided"]), told["time"]) == ({"chat"}, START + 599)
    assert re.search(rf"(stays at|->) {told['decided']['chat']['desired']}, because", words)


def test_explain_says_where_the_costs_of_a_step_come_from() -> None:
    measured = measured_of(TIMES)
    plant = QueuePlant(running=2, cold_start_s=40.0, measured=measured)
    plant.run(rate_of(2), 60)
    gone = replace(plant.see(plant.load(rate_of(2))).load, measured=None)
    for load, said in (
        (replace(gone, measured=measured), "replicas measured 30+-0.9 + 0.4+-0.04 + 0.1+-0.01 ms"),
        (gone, "that have ended"),
    ):
        seen = plant.see(load)
        decided = {"chat": plant.autoscaler.observe(seen, at=plant.at)}
        record = Record(number=0, time=START, seen=FleetObservation(at=plant.at, models={"chat": seen}), decided=decided)
        text = "\n".join(explanation(record, "chat"))
        assert said in text
        assert f"the load has since determined {decided['chat'].inputs['taught_step']:.0%} of the step, " in text
        assert f" requests/s (over {decided['chat'].inputs['rate_over_s']:.0f} s) x " in text


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (measured_of(TIMES), "what they cost is known 15 s after the first of them was answered"),
        (None, "what they cost is not measured yet"),
    ],
)
def test_explain_says_what_is_missing_before_the_demand_is_known(measured: MeasuredCosts | None, said: str) -> None:
    plant = QueuePlant(running=1, cold_start_s=40.0, measured=measured)
    seen = plant.see(plant.load(rate_of(1)))
    decided = {"chat": plant.autoscaler.observe(seen, at=plant.at)}
    record = Record(number=0, time=START, seen=FleetObservation(at=plant.at, models={"chat": seen}), decided=decided)
    assert said in "\n".join(explanation(record, "chat"))


def refused_in(log: Path, path: Path, **refused: float) -> Path:
    """Write the log to ``path`` as if quotas had refused requests in each of its last 30 seconds, and return ``path``."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    for row in rows[-30:]:
        row["seen"]["models"]["chat"]["load"] |= refused
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ({"over_quota": 7.0}, "3.50 requests/s that tenants' quotas refused"),
        ({"over_quota": 700.0}, "350.00 requests/s that tenants' quotas refused"),
        ({"over_quota_unread": 3.0}, "up to 1.50 requests/s that tenants' quotas refused before their model was read"),
        (
            {"over_quota": 7.0, "over_quota_unread": 3.0},
            "3.50 requests/s that tenants' quotas refused, and up to 1.50 more before their model was read",
        ),
    ],
)
def test_explain_says_what_quotas_refused_and_nothing_is_decided_from_it(
    log: Path, tmp_path: Path, refused: dict[str, float], said: str
) -> None:
    path = refused_in(log, tmp_path / "refused.jsonl", **refused)
    text = run("explain", "-f", path, "--model", "chat").stdout
    assert f"\n  refused   not in the demand: {said} (over 60 s)\n" in text
    without = [line for line in text.splitlines() if not line.startswith("  refused ")]
    assert without == run("explain", "-f", log, "--model", "chat").stdout.splitlines(), "a log of before is explained as before"
    assert "not in the demand" not in run("explain", "-f", path, "--at", "2026-09-21T14:20:00Z").stdout
    assert run("replay", path).stdout.endswith("decided again: all the same\n")


def test_explain_says_that_nobody_asks_a_model_at_zero(tmp_path: Path) -> None:
    plant, scaler = Plant(running=0, minimum=0), FleetScaler(FleetRules(models={"chat": RULES}))
    seen = FleetObservation(at=1.0, models={"chat": plant.see(ModelLoad(interval_s=1.0))})
    before = FleetScaler(scaler.rules)
    record = Record(number=0, time=START, seen=seen, decided=scaler.observe(seen), scaler=before)
    path = tmp_path / "zero.jsonl"
    path.write_bytes(TypeAdapter(Record).dump_json(record, exclude_defaults=True, by_alias=True))
    assert "chat, 2026-09-21T14:13:20Z: stays at 0, because no requests arrive\n" in run("explain", "-f", path).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "chta"], "nothing was decided for 'chta'; decided for: (ingresses), chat"),
        (
            ["--at", "2026-09-22T00:00:00Z"],
            "nothing is logged at 2026-09-22T00:00:00Z; the log reaches from 2026-09-21T14:13:20Z to 2026-09-21T14:23:19Z",
        ),
        (["--at", "2026-09-20T00:00:00"], "nothing is logged at 2026-09-20T00:00:00"),
    ],
)
def test_what_is_not_in_the_log_is_named(log: Path, arguments: list[str], message: str) -> None:
    result = run("explain", "-f", log, *arguments)
    assert message in str(result.exception)


def test_a_wrong_time_or_duration_is_a_wrong_command_line(log: Path) -> None:
    assert "'yesterday' is not a time" in run("explain", "-f", log, "--at", "yesterday").stderr
    wrong = run("log", "--since", "soon")
    assert wrong.exit_code == 2
    assert "'soon' is not a duration" in wrong.stderr


def test_replay_decides_the_same_and_says_where_it_does_not(log: Path, tmp_path: Path) -> None:
    same = run("replay", log)
    assert same.stdout == "records: 600, 2026-09-21T14:13:20Z to 2026-09-21T14:23:19Z, decided again: all the same\n"
    assert same.exit_code == 0
    changed = tmp_path / "changed.jsonl"
    changed.write_text(log.read_text().replace('"target":2', '"target":1'))
    other = run("replay", changed)
    assert other.exit_code == 1
    assert re.search(r"decided differently: \d+ of 600 records, the first at 2026-09-21T14:", other.stdout)


def test_replay_with_another_policy_compares(log: Path, tmp_path: Path) -> None:
    replicas = {"min": 1, "max": 9, "ttft_slo_s": 5.0, "utilization": 0.4}
    other = tmp_path / "roomy.yaml"
    other.write_text(yaml.safe_dump({"models": {"chat": {"model": "/m", "replicas": replicas}}}))
    result = run("replay", log, "--policy", other)
    rows = [re.split(r" {2,}", line.strip()) for line in result.stdout.splitlines() if line.startswith("chat")]
    assert [row[1] for row in rows] == ["as it ran", "same, simulated", "roomy.yaml, simulated"]
    cost = [float(row[-3].replace(",", "")) for row in rows]
    assert cost[2] > cost[1]
    assert "proves nothing" not in result.stdout
    slow = tmp_path / "slow.jsonl"
    slow.write_text(log.read_text().replace('"steps":', '"late_first_tokens":2.0,"steps":'))
    assert "chat: the simulation is far from what happened" in run("replay", slow, "--policy", other).stdout
    other.write_text(yaml.safe_dump({"models": {"talk": {"model": "/m"}}}))
    unknown = run("replay", log, "--policy", other)
    assert "roomy.yaml has no model 'chat', and the log has; models of roomy.yaml: talk" in str(unknown.exception)


def test_of_two_files_an_error_names_the_one_that_is_wrong(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("models: {chat: {model: /m, replicas: {min: 3, max: 2}}}")
    assert str(run("replay", log, "--policy", other).exception).startswith(f"{other}: models.chat.replicas.max: min is 3")


def test_names_are_no_markup(log: Path, tmp_path: Path) -> None:
    named = tmp_path / "named.jsonl"
    named.write_text(log.read_text().replace('"chat"', '"[/red]"'))
    assert "  [/red]  " in run("log", "-f", named).stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("option", ["--json", "--since=9m"])
def test_a_full_disk_is_said(log: Path, unbuffered: str, option: str) -> None:
    command = [sys.executable, "-m", "serve_app.cli.main", "autoscale", "log", "-f", str(log), option]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": unbuffered}
        )
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


def test_a_file_is_cut_to_what_is_asked_for(log: Path) -> None:
    whole, part = run("log", "-f", log), run("log", "-f", log, "--since", "60s")
    assert whole.stdout.count(" chat ") > 0
    assert "leave --since out" in run("log", "-f", log, "--since", "60s", "--json").stderr
    assert part.stdout == "no change in 2026-09-21T14:22:19Z to 2026-09-21T14:23:19Z\n"
    assert "'chta'; decided for" in str(run("log", "-f", log, "--model", "chta").exception)


def test_of_a_log_with_a_gap_the_longest_stretch_is_simulated(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines()
    file, policy = tmp_path / "gap.jsonl", tmp_path / "same.yaml"
    policy.write_text(yaml.safe_dump({"models": {"chat": {"model": "/m", "replicas": {"min": 1, "max": 9}}}}))
    file.write_text("\n".join([*lines[:400], *lines[500:]]))
    replayed = run("replay", file, "--policy", policy)
    assert "left out: 100 of 500 records, after a gap" in replayed.stderr
    assert "2026-09-21T14:13:20Z to 2026-09-21T14:19:59Z. Simulated" in replayed.stdout
    file.write_text("\n".join([*lines[:30], *lines[500:]]))
    assert "take a piece of 60 s or more" in str(run("replay", file, "--policy", policy).exception)
    file.write_text("\n".join(lines[1:]))
    assert "nothing in it can be decided again: there is no snapshot" in str(run("replay", file).exception)


@pytest.mark.parametrize(
    "old",
    ['"running":', '"requests":', '"step_s":', '"time":', '"busy_s":', '"kv_usage":', '"prompt_tokens":', '"output_token_s":'],
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e300", "1e300"])
def test_damaged_numbers_end_in_a_sentence(log: Path, tmp_path: Path, old: str, value: str) -> None:
    lines = log.read_text().splitlines()[:150]  # a replay takes as long as its log
    lines[75] = re.sub(f"{old}[0-9.e-]+", f"{old}{value}", lines[75])
    file, policy = tmp_path / "damaged.jsonl", tmp_path / "same.yaml"
    policy.write_text(yaml.safe_dump({"models": {"chat": {"model": "/m", "replicas": {"min": 1, "max": 9}}}}))
    file.write_text("\n".join(lines))
    for arguments in (["log", "-f", file], ["explain", "-f", file], ["replay", file], ["replay", file, "--policy", policy]):
        result = run(*arguments)
        assert result.exception is None or isinstance(result.exception, DecisionLogError | SystemExit), arguments


def test_a_negative_count_is_named_before_anything_is_simulated(log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines()
    lines[300] = re.sub('"prompt_tokens":[0-9.e-]+', '"prompt_tokens":-1e300', lines[300])
    file, policy = tmp_path / "damaged.jsonl", tmp_path / "same.yaml"
    policy.write_text(yaml.safe_dump({"models": {"chat": {"model": "/m", "replicas": {"min": 1, "max": 9}}}}))
    file.write_text("\n".join(lines))
    assert "has -" in str(run("replay", file, "--policy", policy).exception)


@pytest.mark.parametrize("arguments", [["-h"], ["explain", "-h"]])
def test_help_has_a_short_option(arguments: list[str]) -> None:
    assert "Usage: " in run(*arguments).output


@pytest.mark.parametrize(
    ("old", "value"), [('"kv_usage":', "1e308"), ('"output_token_s":', "-1e308"), ('"requests_per_s":', "Infinity")]
)
def test_what_nothing_can_be_is_not_explained(log: Path, tmp_path: Path, old: str, value: str) -> None:
    *before, last = log.read_text().splitlines()
    damaged = re.sub(f"{old}[0-9.e-]+", f"{old}{value}", last)
    assert damaged != last
    file = tmp_path / "damaged.jsonl"
    file.write_text("\n".join([*before, damaged]))
    for more in ([], ["--json"]):
        assert f"has {old[1:-2]} {float(value):g} for 'chat'" in str(run("explain", "-f", file, *more).exception)


def test_a_log_of_a_clock_before_1970_is_shown(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text(re.sub(r'"time":1[0-9]{9}', '"time":-100', log.read_text()))
    assert run("log", "-f", file).exception is None


@pytest.mark.parametrize("text", ["", "no json\n", '{"number": 1}\n'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    result = run("replay", file)
    assert "logs are written by `serve-app autoscale log --json`" in str(result.exception)


@pytest.mark.parametrize(("maximum", "fixed"), [(2, True), (3, False)])
def test_a_fleet_in_which_nothing_may_scale_is_told_from_one_without_a_log(
    maximum: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_settings({"models": {"chat": {"model": "/a", "replicas": {"min": 2, "max": maximum}}}})
    (application,) = serve_config(settings)["applications"]
    details = {"applications": {settings.name: {"deployed_app_config": application}}}
    client = SimpleNamespace(get_serve_details=lambda: details)
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: client)
    assert (autoscale._is_fixed(settings.name), autoscale._is_fixed("another")) == (fixed, False)


def test_explain_says_how_far_measured_latencies_are_from_computed_ones(log: Path) -> None:
    said = " ".join(run("explain", "-f", log).stdout.split())
    steps = r"mean step \d+ ms \(about the time between tokens inside the engine\), \d+ ms expected"
    late = r"0\.0% of first tokens are late without a queue \(\d+ s of an even load(, corrects from 180 s on)?\)"
    assert re.search(rf"feedback {steps}; {late}: capacity x [01]\.\d\d", said)
