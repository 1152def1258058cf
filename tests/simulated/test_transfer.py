"""A read takes as long as its link says, reads over one link follow each other, and a wrong link is refused by name."""

from typing import Any

import pytest

from serve_app.errors import ConfigError
from serve_app.simulated.transfer import LINKS, LinkQueue, link_from, transfer_s

SLOW = {"bandwidth_gbit_s": 10, "latency_us": 100, "bandwidth_efficiency": 1.0}


def test_a_read_takes_the_latency_and_its_bytes_by_the_reached_bandwidth() -> None:
    assert transfer_s(link_from(SLOW), 1_250_000_000) == pytest.approx(1.0001)
    assert transfer_s(link_from(SLOW), 0) == 0.0
    # 8,000 tokens of an 8B Llama have 1.05 GB of KV: 0.105 s at 80 of 100 Gbit/s.
    assert transfer_s(LINKS["efa-100g"], 8000 * 131_072) == pytest.approx(30e-6 + 0.10486, rel=1e-4)


@pytest.mark.parametrize(("name", "gbytes_per_s"), [("nvlink-4", 450), ("pcie-4", 31.5), ("efa-100g", 12.5), ("efa-400g", 50)])
def test_links_have_the_bandwidth_of_one_direction(name: str, gbytes_per_s: float) -> None:
    assert LINKS[name].bandwidth_gbit_s / 8 == gbytes_per_s


def test_reads_over_one_link_follow_each_other() -> None:
    queue = LinkQueue()
    assert queue.wait_s(5.0) == 0.0
    assert [queue.add(at, 2.0) for at in (5.0, 5.5, 20.0)] == [5.0, 7.0, 20.0]
    assert (queue.wait_s(21.0), queue.wait_s(23.0)) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("efa", "simulated.link: unknown name 'efa'; known are efa-100g, efa-400g, nvlink-4, pcie-4, or give a mapping"),
        ({"latency_us": 5}, "simulated.link: missing 1 required keyword-only argument: 'bandwidth_gbit_s'; fields are "),
        (SLOW | {"bandwidth_gbit_s": 0}, "simulated.link.bandwidth_gbit_s: is 0; must be above 0"),
        (SLOW | {"latency_us": -1}, "simulated.link.latency_us: is -1; must not be negative"),
        (SLOW | {"bandwidth_gbit_s": "10"}, "simulated.link.bandwidth_gbit_s: is '10'; give a number"),
        (SLOW | {"bandwidth": 10}, "simulated.link.bandwidth: unknown field; known are name, bandwidth_gbit_s, latency_us"),
    ],
)
def test_a_wrong_link_is_refused(link: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        link_from(link)
    assert str(refused.value).startswith(said)


def test_a_link_may_have_no_latency() -> None:
    assert transfer_s(link_from(SLOW | {"latency_us": 0}), 1250) == pytest.approx(1e-6)
