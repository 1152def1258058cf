import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from loadtest.errors import UsageError
from loadtest.judge.cost import Cost
from loadtest.judge.search import Ask, Capacity, Probe, RateResult
from loadtest.judge.summary import Quantile, interval
from loadtest.records import ServerSample, read_manifest
from loadtest.report.figure_kinds import KINDS
from loadtest.report.figures import read_run
from loadtest.report.glossary import TERMS, gloss
from loadtest.report.report import write_report
from loadtest.report.tiles import tiles
from loadtest.wording import seconds
from tests.loadtest.synthetic import write_run

SHORT = {"duration_s": 20, "warmup_s": 2}
"""Quick to draw, and still with some hundred requests."""


class Page(HTMLParser):
    """The parts of a page that the tests check: its tables, tags and words, and everything that it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self._in_cell = False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        links = (value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "srcset"))
        self.loaded += [link for link in links if not link.startswith(("#", "data:"))]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._in_cell = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())
        if self._in_cell:
            self.tables[-1][-1][-1] += data

    def table(self, *head: str) -> list[list[str]]:
        """Return the rows below the head that begins with these words."""
        return next(table[1:] for table in self.tables if table[0][: len(head)] == list(head))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid run with its report; no test changes it."""
    machine = {"cores": 2, "memory_bytes": 25276510208}
    run = write_run(tmp_path_factory.mktemp("report") / "run", rate=20, scenario=SHORT, machine=machine)
    write_report(run)
    return run


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows due in the window, read as plain JSON: nothing of the package is between the test and the records."""
    asked, rows = (
        [json.loads(line) for line in (run / name).read_text().splitlines()] for name in ("schedule.jsonl", "rows.jsonl")
    )
    rows = [row | {"owed": asked[row["id"]]["output_tokens"]} for row in rows]
    return [row for row in rows if SHORT["warmup_s"] <= row["due_s"] < SHORT["duration_s"]]


def values_of(rows: list[dict[str, Any]], metric: str) -> Iterator[float]:
    """The metric by its definition; infinite for what failed."""
    for row in rows:
        chunks = row.get("chunks", [])
        if row["state"] != "ok":
            yield from [math.inf] * (max(1, row["owed"] - 1) if metric.startswith("ITL") else 1)
        elif metric == "TTFT":
            yield row["first_s"] - row["due_s"]
        elif metric == "TTFT since sending":
            yield row["first_s"] - row["sent_s"]
        elif metric == "E2E":
            yield row["end_s"] - row["due_s"]
        elif metric == "E2E since sending":
            yield row["end_s"] - row["sent_s"]
        elif metric.startswith("TPOT") and row["output_tokens"] > 1:
            yield (row["last_s"] - row["first_s"]) / (row["output_tokens"] - 1)
        elif metric.startswith("largest") and row["output_tokens"] > 1:
            yield max(b[0] - a[0] for a, b in pairwise(chunks)) / 1e3
        elif metric.startswith("ITL"):
            yield from ((b[0] - a[0]) / 1e3 for a, b in pairwise(chunks))
            yield from [0.0] * sum(num - 1 for _, num in chunks)


def in_seconds(cell: str) -> float:
    """The value of such as ``123 ms [118, 130]``."""
    number, unit = cell.split(" ")[:2]
    return float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]


@pytest.mark.parametrize(
    "metric", ["TTFT", "E2E", "TTFT since sending", "E2E since sending", "TPOT, ", "ITL, ", "largest ITL of a request"]
)
def test_each_percentile_of_the_page_is_that_of_the_rows(run: Path, metric: str) -> None:
    rows = Page(run / "report.html").table("metric")
    cells = next(row for row in rows if row[0] == metric or (metric.endswith(", ") and row[0].startswith(metric)))
    values = sorted(values_of(rows_of(run), metric))
    assert int(cells[7]) > 0
    num_asked_for_one = sum(math.isinf(value) for value in values) - int(cells[7])  # failed, and have no such metric
    del values[len(values) - num_asked_for_one :]
    assert int(cells[5]) == len(values)
    for q, cell in zip((0.5, 0.9, 0.95), cells[1:4], strict=True):
        if not cell.startswith("≥"):
            assert in_seconds(cell) == pytest.approx(values[math.ceil(q * len(values)) - 1], rel=0.005)
    assert not all(cell.startswith("≥") for cell in cells[1:4])


@pytest.mark.parametrize(
    ("told", "rates"), [([0, 2, 2, 8], [2, 0, 6]), ([0, 50, 30, 60], None), ([100, 10, 101, 11], None), ([5], None)]
)
def test_a_counter_that_fell_has_no_rate(run: Path, told: list[int], rates: list[int] | None) -> None:
    data = read_run(run)
    server = [ServerSample(float(t), "metrics", {"preemptions": float(value)}) for t, value in enumerate(told)]
    found = replace(data, records=replace(data.records, server=server)).counter_rate("preemptions")
    assert (None if found is None else found[1].tolist()) == rates


def test_the_page_begins_with_how_fast_how_much_how_many_failed_and_when(run: Path) -> None:
    text = (run / "report.html").read_text()
    summary, rows = read_run(run).summary, rows_of(run)
    found = {tile.label: tile.lines for tile in tiles(summary, read_manifest(run))}
    assert list(found) == ["TTFT", "E2E", "requests/s", "tokens/s", "cost", "errors", "date"]
    median = summary.distributions["ttft"].at(0.5)
    assert median is not None
    assert f"{found['TTFT'][0].value} {found['TTFT'][0].note}" == interval(median)
    failed = sum(row["state"] != "ok" for row in rows)
    assert found["errors"][0].note == f"{failed} of {len(rows)} requests"
    assert found["date"][0].value == "2023-11-14"
    sections = [
        'class="tiles"',
        "<h2>Latencies</h2>",
        "<h2>Numbers</h2>",
        "<h2>Workload</h2>",
        "<h2>Generator</h2>",
        "<h2>Audit</h2>",
    ]
    places = [text.index(section) for section in sections]
    assert places == sorted(places)
    for lines in found.values():
        assert all(line.value in text for line in lines)


def test_an_invalid_run_has_no_tile_but_the_date(tmp_path: Path) -> None:
    sick = write_run(tmp_path / "run", rate=20, scenario=SHORT, sick=True)
    assert [tile.label for tile in tiles(read_run(sick).summary, read_manifest(sick))] == ["date"]


def test_the_cost_is_told_in_all_and_per_good_request(run: Path) -> None:
    cost_of_it = Cost(9.0, replica_s=36.0, seen_s=18.0, gpu_s=144.0, replica_s_per_good=0.12, gpu_s_per_good=0.48)
    summary = msgspec.structs.replace(read_run(run).summary, cost=cost_of_it)
    cost = next(tile for tile in tiles(summary, read_manifest(run)) if tile.label == "cost")
    assert [(line.value, line.note) for line in cost.lines] == [
        ("9", "output tokens per good request"),
        ("36", "replica-seconds in 18 s"),
        ("0.12", "replica-seconds per good request"),
        ("144", "GPU-seconds in 18 s"),
        ("0.48", "GPU-seconds per good request"),
    ]


def test_terms_are_explained_where_they_stand_and_text_of_others_is_escaped() -> None:
    assert (
        gloss("TTFT, n & <b>")
        == f'<abbr title="{TERMS["TTFT"]}">TTFT</abbr>, <abbr title="{TERMS["n"]}">n</abbr> &amp; &lt;b&gt;'
    )
    assert gloss("n and n_eff") == f'<abbr title="{TERMS["n"]}">n</abbr> and <abbr title="{TERMS["n_eff"]}">n_eff</abbr>'
    assert gloss("TTFT TTFT").count("abbr title") == 1
    assert gloss("a-n") == "a-n"


def test_values_have_units(run: Path) -> None:
    text = (run / "report.html").read_text()
    gates = {row[0]: row[2:4] for row in Page(run / "report.html").table("gate")}
    assert gates["loop stalls"][1] == "250 ms"
    assert gates["CPU p95"][1] == "85%"
    assert "memory 23.5 GiB" in text
    assert "25276510208" not in text


def test_a_fault_is_marked_where_arrivals_are_drawn_over_time(run: Path) -> None:
    _, over_time = next(kind for kind in KINDS if kind.name == "arrivals").panels(read_run(run))
    ax = Figure().add_subplot()
    over_time(ax)
    assert {0.0, 5.0, 30.0, 33.0, 60.0} <= {float(np.asarray(line.get_xdata())[0]) for line in ax.lines}


def test_states_and_rates_of_the_page_are_those_of_the_rows(run: Path) -> None:
    page, rows = Page(run / "report.html"), rows_of(run)
    states = {name.replace(" ", "_"): int(count) for name, count in page.table("state", "requests")}
    assert states == {state: sum(row["state"] == state for row in rows) for state in {row["state"] for row in rows}}
    per_second = {name: float(value.split(" [")[0].replace(",", "")) for name, value in page.table("per second of the window")}
    assert per_second["requests offered"] == pytest.approx(len(rows) / 18, rel=0.0005)


def test_the_classes_of_the_page_are_those_of_the_rows(tmp_path: Path) -> None:
    classes: list[dict[str, Any]] = [
        {"name": "plain", "weight": 3},
        {"name": "special", "from_s": 10, "until_s": 12.5, "model": "tuned", "tools": [{"type": "function"}]},
        {"name": "rare"},
    ]
    classes = [{**cls, "endpoint": "chat", "prompt": "text"} for cls in classes]
    run = write_run(tmp_path / "run", rate=20, scenario={**SHORT, "requests": classes, "slo": "ttft_p95=0.2s"})
    page = Page(write_report(run))
    named = {line["id"]: line["cls"] for line in map(json.loads, (run / "schedule.jsonl").read_text().splitlines())}
    asks = {"plain": "opt-125m", "special": "tuned", "rare": "opt-125m"}
    table = page.table("class", "model")
    assert [(row[0], row[1]) for row in table] == list(asks.items())
    for cls, _, prompt, p50, _, within, num, failed in table:
        rows = [row for row in rows_of(run) if named[row["id"]] == cls]
        waits = sorted(values_of(rows, "TTFT"))
        assert (int(num), int(failed)) == (len(rows), sum(row["state"] != "ok" for row in rows))
        told = [row["prompt_tokens"] for row in rows if "prompt_tokens" in row]
        assert float(prompt) == pytest.approx(sum(told) / len(told), abs=0.51)
        assert in_seconds(p50) == pytest.approx(waits[math.ceil(len(waits) / 2) - 1], rel=0.01)
        good = sum(row["state"] == "ok" and max(values_of([row], "TTFT")) <= 0.2 for row in rows)
        assert 0 < good < len(rows)
        assert within == f"{good / len(rows):.1%}"
    words = " ".join(page.words)
    assert "opt-125m, tuned at http://127.0.0.1:8000" in words
    assert "tools (1, tool_choice auto)" in words
    assert "weight 1, model tuned, drawn from 10 s until 12.5 s" in words
    assert words.count(", drawn") == 1


def test_a_report_made_twice_is_the_same_to_the_byte(run: Path) -> None:
    made = [run / "report.html", run / "summary.json", run / "autoscale.json", *sorted((run / "figures").iterdir())]
    before = {path: path.read_bytes() for path in made}
    write_report(run)
    assert [path.name for path in made if path.read_bytes() != before[path]] == []


def test_the_page_needs_nothing_else_and_its_ids_are_unique(run: Path) -> None:
    page = Page(run / "report.html")
    assert page.loaded == []
    assert not page.tags & {"script", "link", "iframe", "object", "embed"}
    assert not re.search(r"@import|@font-face|url\((?!#)", (run / "report.html").read_text())
    assert len(page.ids) == len(set(page.ids))


def test_each_figure_is_there_as_svg_and_png(run: Path) -> None:
    names = {path.stem for path in (run / "figures").iterdir()}
    shown = set(Page(run / "report.html").ids)
    assert names == {"cdf-ttft", "cdf-tpot", "cdf-e2e", "tail", "due-send", "chunks", "lengths", "waterfall"} | {
        "timeline",
        "autoscaling",
        "arrivals",
        "health",
    }
    assert names <= shown
    rows = rows_of(run)
    legend = f"TTFT (n={len(rows)}, failed={sum(row['state'] != 'ok' for row in rows)})"
    assert legend in (run / "figures" / "cdf-ttft.svg").read_text()
    assert sorted(path.name for path in (run / "figures").iterdir()) == sorted(
        f"{n}.{kind}" for n in names for kind in ("svg", "png")
    )


def test_an_invalid_run_shows_its_gates_and_no_result(tmp_path: Path) -> None:
    run = write_run(tmp_path / "sick", rate=20, sick=True, scenario=SHORT)
    (run / "figures").mkdir()
    (run / "figures" / "cdf-ttft.svg").write_text("of an earlier report")
    page = Page(write_report(run))
    words = " ".join(page.words)
    assert "INVALID" in words
    assert "FAILED" in [row[1] for row in page.table("gate")]
    assert {path.stem for path in (run / "figures").iterdir()} == {"arrivals", "health", "timeline"}
    heads = [table[0][0] for table in page.tables]
    assert not {"metric", "SLO", "per second of the window"} & set(heads)
    assert not re.search(r"\d+ ms \[", words)


def test_what_target_and_scenario_say_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\" onload='x"
    info = {"version": "<img src=http://203.0.113.1/x>", "simulated": "<b>a10g</b>"}
    fault = {"at_s": 5, "action": "command", "command": ["true"], "name": evil}
    scenario = SHORT | {"model": evil, "faults": [fault]}
    run = write_run(tmp_path / "evil", scenario=scenario, model=evil, target_info=info, command=["run", evil], problems=[evil])
    page = Page(write_report(run))
    assert not page.tags & {"script", "img"}
    assert page.loaded == []
    assert any(evil in word for word in page.words)
    assert any("simulated (<b>a10g</b>)" in word for word in page.words)


def test_the_page_says_what_kind_of_run_it_was(tmp_path: Path) -> None:
    scenario = SHORT | {"arrival": {"law": "closed", "concurrency": 4, "max_requests": 300}}
    run = write_run(tmp_path / "run", scenario=scenario, state="interrupted", target_info={"simulated": "a100"})
    text = " ".join(Page(write_report(run)).words)
    for words in (
        "The run did not finish; its records until then are below.",
        "Closed loop: a client waits",
        "simulated (a100)",
        "closed, closed loop: concurrency 4",
    ):
        assert words in text


def test_a_comparison_names_the_faster_run(run: Path, tmp_path: Path) -> None:
    slow = write_run(tmp_path / "slow", rate=20, slow=1.5, scenario=SHORT)
    page = Page(write_report(slow, other=run))
    ratios = {row[0]: row[1:] for row in page.table("", "this run / the other")}
    assert float(ratios["TPOT p50"][0]) == pytest.approx(1.5, rel=0.02)
    assert ratios["TPOT p50"][2] == "the other run is faster"
    assert {"both-ttft", "both-tpot", "both-e2e", "both-ratios"} <= set(page.ids)


def test_a_search_shows_its_probes_and_the_capacity(tmp_path: Path) -> None:
    search, probes, scenario = tmp_path / "search", [], SHORT | {"slo": "ttft_p97=900ms"}  # the p99 is among those that failed
    for seed, rate in ((1, 5.0), (2, 10.0), (3, 20.0)):
        write_run(search / f"probe-{seed}", seed=seed, rate=rate, slow=(rate / 8) ** 2, scenario=scenario)
        probes.append(Probe(Ask(rate, 100, seed, "search"), ((100.0, rate),)))
    write_run(search / "probe-4", seed=4, rate=10.0, sick=True, scenario=scenario)
    probes.append(Probe(Ask(10.0, 100, 4, "search"), ((0.0, 0.0),), valid=False, reason="the loop stood still"))
    verdicts = [RateResult(5.0, "pass", [0.99]), RateResult(10.0, "undecided", [0.98]), RateResult(20.0, "fail", [0.9])]
    found = Capacity(7.1, 5.0, 10.0, 5.0, False, False, verdicts, probes)
    (search / "saturate.json").write_bytes(msgspec.json.encode(found))
    page = Page(write_report(search))
    rows = page.table("rate", "purpose", "verdict of the rate", "steady", "n")
    assert [row[:3] for row in rows[:3]] == [
        ["5/s", "search", "pass"],
        ["10/s", "search", "undecided"],
        ["20/s", "search", "fail"],
    ]
    assert all(re.search(r"s \[", row[7]) for row in rows[:3])
    assert rows[3] == ["10/s", "search", "invalid", "not known", rows[3][4], "", "", ""]
    assert "Invalid at 10/s: the loop stood still." in page.words
    assert [word for word in page.words if word.startswith("Knee")] == ["Knee: 5/s by power."]  # too few rates for a bend
    assert [abs(int(row[4]) - 18 * rate) < 60 for row, rate in zip(rows, (5, 10, 20, 10), strict=True)] == [True] * 4
    assert any("Capacity 7.1 requests/s, 95 % interval 5 to 10" in word for word in page.words)
    assert {path.name for path in (search / "figures").iterdir()} == {"load.svg", "load.png"}


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_folder_that_holds_no_run_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path))):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("quantile", "words"),
    [
        (Quantile(0.5, 0.1234, 0.118, 0.13), "123 ms [118, 130]"),
        (Quantile(0.99, 0.01234, 0.0118, None), "12.3 ms [11.8, –]"),
        (Quantile(0.99, 12.3, 11.0, 14.25), "12.3 s [11.0, 14.2]"),
        (Quantile(0.99, 0.0000123, 0.00001, 0.00002), "12.3 µs [10.0, 20.0]"),
        (Quantile(0.99, 12.3, 11.0, high_failed=True), "12.3 s [11.0, ∞]"),
        (Quantile(0.99, None, censored_s=120.0), "≥ 120 s"),
        (Quantile(0.99, None, failed=True), "∞ (failed)"),
        (Quantile(0.99, None), "n too small"),
    ],
)
def test_percentiles_are_written_with_their_interval(quantile: Quantile, words: str) -> None:
    assert interval(quantile) == words


def test_the_first_value_names_the_unit_of_all() -> None:
    assert seconds([0.0, 0.0, 0.0116]) == ["0.0 ms", "0.0", "11.6"]
    assert seconds([0.0]) == ["0.00 µs"]
    assert seconds([9.9994, 10.2, None]) == ["9999 ms", "10200", "–"]
