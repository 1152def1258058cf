"""The preview draws the dashboards for the series that a Prometheus returns."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.monitoring.expressions import FACTS
from tests.ports import free_port
from tools.monitoring.boards import BOARDS, board_file
from tools.monitoring.facts import filled
from tools.monitoring.panels import Board
from tools.monitoring.preview import Line, clock, clock_ticks, draw, legend_of, main, picture, shown, with_data


class TwoSeries:
    """Has two series for each panel of series, zeros for the panels named zero, and nothing for the others."""

    span = (-300.0, 0.0)

    def lines(self, panel: Mapping[str, Any]) -> Iterator[Line]:
        if panel["title"] == "zero":
            yield Line("a", (-60.0, 0.0), (0.0, 0.0))
        elif panel["type"] == "timeseries":
            yield Line("a", (-60.0, 0.0), (1.0, 2.0))
            yield Line("b", (-60.0, 0.0), (3.0, 4.0))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_each_panel_is_at_its_place_with_its_title_and_its_series(board: Board) -> None:
    made = json.loads(filled(board_file(board), FACTS))
    panels = [panel for panel in made["panels"] if panel["type"] != "row"]
    figure = picture(made, TwoSeries())
    assert [ax.get_title(loc="left") for ax in figure.axes] == [panel["title"] for panel in panels]
    assert [len(ax.lines) for ax in figure.axes] == [2 if panel["type"] == "timeseries" else 0 for panel in panels]
    boxes = [ax.get_position() for ax in figure.axes]
    assert [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)] == []


def test_panels_without_data_are_left_out_and_the_others_move_up_and_fill_their_lines() -> None:
    def panel(title: str, kind: str, x: int, y: int, w: int, h: int) -> dict[str, Any]:
        return {"title": title, "type": kind, "gridPos": {"x": x, "y": y, "w": w, "h": h}}

    board = [panel("A", "row", 0, 0, 24, 1), panel("a", "stat", 0, 1, 24, 4), panel("B", "row", 0, 5, 24, 1)]
    board += [
        panel("b", "timeseries", 0, 6, 8, 8),
        panel("zero", "timeseries", 8, 6, 8, 8),
        panel("c", "timeseries", 16, 6, 8, 8),
    ]
    board += [panel("d", "timeseries", 0, 14, 12, 8), panel("C", "row", 0, 22, 24, 1), panel("zero", "stat", 0, 23, 24, 8)]
    kept = with_data(board, TwoSeries())
    assert [(each["title"], *(each["gridPos"][side] for side in "xyw")) for each in kept] == [
        ("B", 0, 0, 24),
        ("b", 0, 1, 12),
        ("c", 12, 1, 12),
        ("d", 0, 9, 24),
        ("C", 0, 17, 24),
        ("zero", 0, 18, 24),
    ]


@pytest.mark.parametrize("values", [(-4.0, 3.0), (-4.0, -3.0), (3.0, 4.0), (0.0, 0.0), (float("nan"), -4.0)])
def test_values_below_zero_are_seen(values: tuple[float, float]) -> None:
    panel = {"title": "a", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "short"}}}
    ax = Figure().add_subplot()
    draw(panel, [Line("a", (-60.0, 0.0), values)], ax, (-60.0, 0.0))
    lowest, highest = ax.get_ylim()
    assert lowest <= 0 <= highest
    assert lowest < highest
    assert [value for value in values if not lowest <= value <= highest and value == value] == []


def test_the_axis_of_bytes_has_round_numbers_of_gib() -> None:
    panel = {"title": "a", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "bytes"}}}
    ax = Figure().add_subplot()
    draw(panel, [Line("a", (-60.0, 0.0), (70.0 * 2**30, 71.0 * 2**30))], ax, (-60.0, 0.0))
    assert [tick / 2**30 for tick in ax.get_yticks()] == [0.0, 15.0, 30.0, 45.0, 60.0, 75.0]


def test_the_time_axis_has_round_times_of_the_clock_over_the_whole_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-05:30")
    time.tzset()
    try:
        panel = {"title": "a", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "short"}}}
        ax, now = Figure().add_subplot(), 1_800_000_007.3  # 13:30:07 in this zone
        draw(panel, [Line("a", (now - 30, now), (1.0, 2.0))], ax, (now - 300, now))
        assert ax.get_xlim() == (now - 300, now)
        assert [label.get_text() for label in ax.get_xticklabels()] == ["13:26", "13:27", "13:28", "13:29", "13:30"]
        assert [clock(at, 60) for at in clock_ticks(now - 60, now)] == [f"13:29:{s}" for s in (10, 20, 30, 40, 50)] + ["13:30:00"]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("lines", [[], [Line("a", (-5.0, 0.0), (float("nan"), float("nan")))]])
def test_a_panel_without_a_value_says_so_in_place_of_an_empty_frame(lines: list[Line]) -> None:
    panel = {"title": "a", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "short"}}}
    ax = Figure().add_subplot()
    draw(panel, lines, ax, (-60.0, 0.0))
    assert [text.get_text() for text in ax.texts] == ["no data yet"]
    assert not ax.axison


def test_a_single_value_is_a_dot() -> None:
    panel = {"title": "a", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "short"}}}
    ax = Figure().add_subplot()
    draw(panel, [Line("a", (-5.0, 0.0), (float("nan"), 1.0)), Line("b", (-5.0, 0.0), (1.0, 1.0))], ax, (-60.0, 0.0))
    assert [line.get_marker() for line in ax.lines] == [".", ""]


def test_a_line_is_named_with_its_last_value_that_is_one() -> None:
    nothing = float("nan")
    assert Line("p95", (-5.0, 0.0), (0.25, nothing)).named("s") == "p95  0.25 s"
    assert Line("p95", (0.0,), (nothing,)).named("s") == "p95  no value"


def test_a_legend_has_the_values_of_its_labels() -> None:
    assert legend_of("{{model}} {{ replica }} p95", {"model": "chat"}) == "chat  p95"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.25, "s", "0.25 s"),
        (0.999, "percentunit", "99.9 %"),
        (3 * 2**30, "bytes", "3 GiB"),
        (12, "short", "12"),
    ],
)
def test_a_value_has_its_unit(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


def test_without_a_prometheus_one_sentence_says_what_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["--prometheus", url, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: no Prometheus answers at {url}; start `make observe` in another terminal\n"
    assert list(tmp_path.iterdir()) == []
