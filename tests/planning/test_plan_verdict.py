"""The verdict follows goodput alone, and the plot shows what the verdict was made from."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
import yaml

from loadtest.report import plots
from serve_app.cli.plan import simulated_settings
from serve_app.config.model import ModelSettings
from serve_app.core.pool_sizes import PoolSizes
from serve_app.engine_args import engine_core_args
from serve_app.planning import plot
from serve_app.planning.comparison import Figures, Hardware, Limits, Side, sides_of
from serve_app.planning.verdict import shown_s, verdict

SVG = "{http://www.w3.org/2000/svg}"


def runs(goods: Sequence[float], *, itl_s: float = 0.02, ttft_s: float = 0.3, requests: float = 60.0) -> list[Figures]:
    """Return a run for each goodput."""
    return [
        Figures(requests_per_s=requests, good_per_s=good, ttft_p50_s=0.1, ttft_p99_s=ttft_s, itl_p99_s=itl_s, moved_bytes=0)
        for good in goods
    ]


def test_apart_pays_if_its_goodput_is_higher_with_each_seed() -> None:
    found = {"together": runs([30.0, 32.0], itl_s=0.26), "routing.apart": runs([48.0, 48.0], itl_s=0.012, ttft_s=0.48)}
    judged = verdict(found)
    assert (judged.pays, judged.best) == (True, "routing.apart")
    assert judged.sentence == (
        "Apart pays, at best as routing.apart: 155 % of the goodput (48.0 good requests/s of 60.0, together 31.0); "
        "ITL p99 falls from 260 ms to 12 ms, TTFT p99 rises from 300 ms to 480 ms."
    )


def test_apart_does_not_pay_for_shorter_gaps_alone() -> None:
    judged = verdict({"together": runs([60.0], itl_s=0.045), "routing.apart": runs([60.0], itl_s=0.0064)})
    assert not judged.pays
    assert judged.sentence.startswith("Apart does not pay, at best as routing.apart: 100 % of the goodput ")
    assert "ITL p99 falls from 45 ms to 6.4 ms, TTFT p99 stays at 300 ms" in judged.sentence


def test_a_gain_with_some_seeds_is_not_enough() -> None:
    judged = verdict({"together": runs([30.0, 40.0, 30.0]), "routing.apart": runs([39.0, 39.0, 39.0])})
    assert not judged.pays
    assert "together 30.0), but not with every seed; " in judged.sentence


def test_a_side_that_pays_goes_before_one_about_as_good_that_does_not() -> None:
    found = {"together": runs([30.0, 47.0, 30.0]), "routing.apart": runs([49.0] * 3), "pools 1:1": runs([49.5] * 3)}
    judged = verdict(found)
    assert (judged.pays, judged.best) == (True, "pools 1:1")
    assert judged.sentence.startswith("Apart pays, at best as pools 1:1: 165 % of the goodput (49.5 ")


def test_apart_does_not_pay_where_kept_gaps_alone_do_as_well() -> None:
    found = {"together": runs([30.0]), "keep_itl": runs([47.0]), "routing.apart": runs([48.0])}
    judged = verdict(found)
    assert (judged.pays, judged.set) == (False, "keep_itl")
    assert "102 % of the goodput (48.0 good requests/s of 60.0, keep_itl 47.0)" in judged.sentence
    judged = verdict({**found, "keep_itl": runs([31.0])})
    assert (judged.pays, judged.set) == (True, "routing.apart")
    judged = verdict({"together": runs([47.0]), "keep_itl": runs([47.0]), "routing.apart": runs([48.0])})
    assert (judged.pays, judged.set) == (False, None)
    assert "together 47.0)" in judged.sentence


def test_where_no_answer_keeps_the_limits_the_sentence_says_so() -> None:
    judged = verdict({"together": runs([0.0]), "routing.apart": runs([0.0])})
    assert not judged.pays
    assert judged.sentence.startswith("Apart does not pay: no answer keeps the limits either way; ITL p99 ")
    judged = verdict({"together": runs([0.0]), "routing.apart": runs([6.0])})
    assert judged.sentence.startswith("Apart pays, at best as routing.apart: 6.0 good requests/s of 60.0, together 0.0; ")


@pytest.mark.parametrize(
    ("apart", "best"), [(59.0, "routing.apart"), (50.0, "pools 2:2")], ids=["about as good", "worse than pools"]
)
def test_the_best_side_is_the_one_without_numbers_to_set_unless_another_is_better(apart: float, best: str) -> None:
    pools = {"pools 1:3": runs([59.4], itl_s=0.03), "pools 2:2": runs([59.5], itl_s=0.007)}
    assert verdict({"together": runs([20.0]), "routing.apart": runs([apart]), **pools}).best == best


def test_each_split_of_the_replicas_is_a_side_and_says_how_to_set_it() -> None:
    sides = sides_of(4, Limits(2.0, 0.1))
    assert [side.name for side in sides] == ["together", "keep_itl", "routing.apart", "pools 1:3", "pools 2:2", "pools 3:1"]
    assert sides[3].configuration == "kv: {transfer: nixl}, pools: {prefill: {min: 1, max: 1}, decode: {min: 3, max: 3}}"
    assert [side.settings["pools"].num_prefill(4) for side in sides[3:]] == [1, 2, 3]
    assert [side.itl_s for side in sides[:3]] == [None, 0.1, None]


@pytest.mark.parametrize("side", sides_of(4, Limits(2.0, 0.1))[1:], ids=lambda side: side.name)
def test_the_printed_keys_make_a_model_like_the_simulated_replicas(side: Side) -> None:
    hardware = Hardware(
        profile="h100-llama-8b", num_accelerators=2, replicas=4, link="efa-400g", max_num_batched_tokens=8192, max_num_seqs=1024
    )
    printed = yaml.safe_load(f"{{{side.configuration}, {simulated_settings(hardware, Limits(1.5, 0.05))}}}")
    model = ModelSettings.model_validate({"name": "m", "model": "/models/m", "device": "cuda", **printed})
    assert (model.replicas.min, model.replicas.max, model.gpus_per_replica) == (4, 4, 2)
    assert (model.replicas.ttft_slo_s, model.replicas.itl_slo_s) == (1.5, 0.05)
    assert (model.keep_itl, model.routing.apart) == (side.name == "keep_itl", side.name == "routing.apart")
    assert (None if model.pools is None else PoolSizes(*model.pools.sizes(4))) == side.settings.get("pools")
    args = engine_core_args(model, "/models/m")
    assert (args["scheduling_policy"], args["max_num_batched_tokens"], args["max_num_seqs"]) == ("priority", 8192, 1024)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.00642, "6.4 ms"), (0.0455, "46 ms"), (0.48, "480 ms"), (2.314, "2.31 s"), (41.0, "41 s")]
)
def test_times_have_two_or_three_digits(seconds: float, shown: str) -> None:
    assert shown_s(seconds) == shown


def test_the_plot_has_a_dot_for_each_side_and_figure_within_its_panel() -> None:
    found = {
        "together": runs([30.0, 32.0], itl_s=0.26),
        "routing.apart": runs([48.0, 50.0], itl_s=0.012),
        "pools 1:1": runs([0.0, 0.0], itl_s=0.0, ttft_s=40.0),
    }
    drawn = plot.svg(found, verdict(found), Limits(2.0, 0.05), "<trace> & more")
    root = ElementTree.fromstring(drawn)
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    dots = root.findall(f"{SVG}circle")
    assert len(dots) == 3 * len(found)
    assert {dot.attrib["fill"] for dot in dots} == set(plot.SERIES)
    assert all(0 < float(dot.attrib["cx"]) < width and 0 < float(dot.attrib["cy"]) < height for dot in dots)
    goods = sorted((float(dot.attrib["cx"]), str(dot[0].text)) for dot in dots if float(dot.attrib["cx"]) < width / 2.5)
    assert [name for _, name in goods][:3] == ["pools 1:1", "together", "routing.apart"]
    texts = [text.text or "" for text in root.findall(f"{SVG}text")]
    assert "<trace> & more" in texts
    assert any(text.startswith("Simulated.") for text in texts)
    assert {"all 60.0", "limit 50 ms", "limit 2.00 s"} <= set(texts)
    assert not re.search(r"nan|inf\b", drawn)


def test_the_plot_has_the_colours_of_the_load_test_kits_figures() -> None:
    assert plots.SERIES[:3] == plot.SERIES
    assert (plot.INK, plot.MUTED, plot.GRID, plot.PAPER) == (plots.INK, plots.MUTED, plots.GRID, plots.PAPER)
