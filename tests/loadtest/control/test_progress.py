"""What the terminal shows while a run goes on."""

from loadtest.control.progress import Figures
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from loadtest.records import HealthSample


def test_a_narrow_terminal_has_counts_and_figures_on_two_lines() -> None:
    cls = {"input_tokens": {"mean": 100}, "output_tokens": {"mean": 50}}
    scenario = parse_scenario({"name": "t", "arrival": {"law": "constant", "rate": 2}, "requests": [cls]})
    figures = Figures(scenario, make_schedule(scenario))
    assert figures.text(0.1, between="\n").count("\n") == 0  # no figures yet
    figures.add([], [HealthSample(1.0, 0, 0.1, lag_max_s=0.004, gc_s=0.0, in_flight=1, num_sent=2, num_rows=0)])
    assert figures.text(0.6) == "due 2  sent 2  done 0  failed 0  lag 4 ms"
    assert figures.text(0.6, between="\n") == "due 2  sent 2  done 0  failed 0\nlag 4 ms"
