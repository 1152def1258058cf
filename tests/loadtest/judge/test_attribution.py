"""These tests compute the parts of an answer's time from sums of a server with known parts (T13)."""

from pathlib import Path

import pytest

from loadtest.control.runner import run
from loadtest.judge.attribution import Attribution, attribution
from loadtest.plan.scenario import parse_scenario
from loadtest.proof.truth.server import running
from loadtest.proof.truth.settings import Law
from loadtest.records import Row, ServerSample, read_lines
from loadtest.wire.target import Target

PARTS = {"lag": 0.002, "connect": 0.001, "queue": 0.1, "prefill": 0.2, "edge": 0.03, "decode": 1.0, "flush": 0.004}


def row(number: int, due_s: float, parts: dict[str, float] = PARTS) -> Row:
    sent_s = due_s + parts["lag"]
    connected_s = sent_s + parts["connect"]
    first_s = connected_s + parts["queue"] + parts["prefill"] + parts["edge"]
    end_s = first_s + parts["decode"] + parts["flush"]
    return Row(number, 0, due_s, "ok", sent_s=sent_s, connected_s=connected_s, first_s=first_s, last_s=first_s, end_s=end_s)


def scrape(t_s: float, served: list[tuple[Row, dict[str, float]]]) -> ServerSample:
    """Return sums over what had ended by then, after a first life of the server of 7 s in each part and 3 requests."""
    ended = [parts for each, parts in served if each.end_s is not None and each.end_s <= t_s]
    values: dict[str, float] = {}
    for part in ("queue", "prefill", "decode"):
        values |= {f"{part}_s_sum": 7 + sum(parts[part] for parts in ended), f"{part}_s_count": 3.0 + len(ended)}
    return ServerSample(t_s, "metrics", values)


def served(parts: dict[str, float] = PARTS) -> list[tuple[Row, dict[str, float]]]:
    """Return 50 slow answers in the first 5 s, then 100 with the given parts."""
    slow = dict.fromkeys(PARTS, 0.5)
    return [(row(n, n / 10, slow), slow) for n in range(50)] + [(row(n, 10 + n / 10, parts), parts) for n in range(50, 150)]


def found(window: tuple[float, float] = (10.0, 40.0), parts: dict[str, float] = PARTS) -> Attribution:
    answers = served(parts)
    result = attribution([scrape(t, answers) for t in (0.0, 9.0, 12.0, 20.0, 39.0, 45.0)], [each for each, _ in answers], window)
    assert result is not None
    return result


def test_the_parts_are_those_of_the_server_and_the_rest_is_edge() -> None:
    result = found()
    assert result.parts() == pytest.approx(PARTS, rel=0.001)
    assert sum(result.parts().values()) == pytest.approx(result.e2e_s, rel=1e-9)
    assert result.ttft_s == pytest.approx(0.333, rel=0.001)
    assert (result.window_s, result.num_client, result.num_server) == ((12.0, 39.0), 100, 100)


def test_mixed_answers_are_averaged() -> None:
    answers = served()
    for index in range(50, 150, 2):
        parts = PARTS | {"queue": 0.3, "edge": 0.05}
        answers[index] = (row(index, answers[index][0].due_s, parts), parts)
    result = attribution([scrape(t, answers) for t in (12.0, 39.0)], [each for each, _ in answers], (0.0, 50.0))
    assert result is not None
    assert result.parts() == pytest.approx(PARTS | {"queue": 0.2, "edge": 0.04}, rel=0.001)


def test_a_server_that_claims_more_than_the_client_saw_leaves_a_negative_rest() -> None:
    answers = served()
    samples = [scrape(12.0, answers), scrape(39.0, answers)]
    samples[1].values["prefill_s_sum"] += 100 * 0.1
    result = attribution(samples, [each for each, _ in answers], (0.0, 50.0))
    assert result is not None
    assert result.edge_s == pytest.approx(0.03 - 0.1, abs=1e-6)


def test_requests_that_only_one_side_knows_are_told() -> None:
    answers = served()
    samples = [scrape(12.0, answers), scrape(39.0, answers)]
    result = attribution(samples, [each for each, _ in answers][:140], (0.0, 50.0))
    assert result is not None
    assert (result.num_server, result.num_client) == (100, 90)


def test_nothing_is_attributed_without_scrapes_parts_or_answers() -> None:
    answers = served()
    rows = [each for each, _ in answers]
    samples = [scrape(t, answers) for t in (12.0, 39.0)]
    assert attribution(samples, rows, (0.0, 30.0)) is None  # one scrape
    assert attribution(samples, rows[:50], (0.0, 50.0)) is None
    assert attribution([ServerSample(t, "metrics", {"running": 1.0}) for t in (12.0, 39.0)], rows, (0.0, 50.0)) is None
    assert attribution([samples[0], ServerSample(39.0, "metrics", samples[0].values)], rows, (0.0, 50.0)) is None


def test_sums_that_a_replica_took_with_it_attribute_nothing() -> None:
    """Or that another ingress behind the same address reported: from the first to the last scrape the sums have risen."""
    answers = served()
    samples = [scrape(t, answers) for t in (12.0, 20.0, 39.0)]
    assert attribution(samples, [each for each, _ in answers], (0.0, 50.0)) is not None
    samples[1].values["decode_s_sum"] = samples[0].values["decode_s_sum"] - 0.5
    assert attribution(samples, [each for each, _ in answers], (0.0, 50.0)) is None


@pytest.mark.slow
def test_the_parts_that_the_law_server_scripts_are_found_in_a_real_run(tmp_path: Path) -> None:
    times = {name: {"law": "constant", "s": s} for name, s in (("ttft", 0.3), ("gap", 0.05), ("edge", 0.25))}
    law = Law.model_validate({**times, "slots": 4})
    asked = {"input_tokens": {"mean": 10}, "output_tokens": {"mean": 9}}
    # Bursts: 8 requests for 4 slots of 0.3 + 8 x 0.05 s, every 2 s; half of them wait for 0.7 s.
    due = tmp_path / "bursts.jsonl"
    due.write_text("".join(f'{{"timestamp": {2000 * n}, "input_length": 10, "output_length": 9}}\n' * 8 for n in range(8)))
    scenario = {
        "name": "parts",
        "arrival": {"law": "trace", "file": str(due)},
        "requests": [asked],
        "duration_s": 18,
        "warmup_s": 0,
    }
    with running(law, log=tmp_path / "truth.jsonl") as url:
        run(parse_scenario(scenario), Target(url), tmp_path / "run", quiet=True, report=False)
    samples = list(read_lines(tmp_path / "run" / "server.jsonl", ServerSample))
    result = attribution(samples, list(read_lines(tmp_path / "run" / "rows.jsonl", Row)), (-5.0, 60.0))
    assert result is not None
    assert (result.num_client, result.num_server) == (64, 64)
    # Each request of a burst arrives a little after the one before it, so those that wait do so a little less.
    assert result.queue_s == pytest.approx(0.35, rel=0.05)
    assert result.prefill_s == pytest.approx(0.3, rel=0.05)
    assert result.decode_s == pytest.approx(0.4, rel=0.05)
    assert result.edge_s == pytest.approx(0.25, rel=0.1)  # and what this machine adds on both sides
    assert result.flush_s == pytest.approx(0, abs=0.02)
