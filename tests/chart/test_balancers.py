"""These tests check what the chart's Ingress tells AWS load balancers and nginx."""

from typing import Any

import pytest

from tests.chart.places import ALB, annotations
from tests.chart.render import at, merged, render


def test_an_aws_load_balancer_takes_the_health_check() -> None:
    """AWS wants 5 s or more between two checks, and a timeout below that."""
    found = annotations("Ingress")(render(ALB))
    interval, timeout = (int(found[f"alb.ingress.kubernetes.io/healthcheck-{name}-seconds"]) for name in ("interval", "timeout"))
    assert 2 <= timeout < interval == 5
    assert found["alb.ingress.kubernetes.io/healthcheck-path"] == "/readyz"


def test_an_aws_load_balancer_gets_the_attributes_of_annotations_beside_the_charts_and_no_old_tls() -> None:
    """An attribute that the annotations repeat is theirs: lint_edge_rows.py refuses another timeout."""
    prefix = "alb.ingress.kubernetes.io"
    given = {
        f"{prefix}/load-balancer-attributes": "routing.http2.enabled=true, access_logs.s3.prefix=a=b,",
        f"{prefix}/target-group-attributes": "load_balancing.algorithm.type=round_robin",
    }
    plain, made = (annotations("Ingress")(render(merged(ALB, at("ingress.annotations", a)))) for a in ({}, given))
    idle, delay = "idle_timeout.timeout_seconds=120", "deregistration_delay.timeout_seconds=600"
    assert plain[f"{prefix}/load-balancer-attributes"] == idle
    assert plain[f"{prefix}/target-group-attributes"] == f"{delay},load_balancing.algorithm.type=least_outstanding_requests"
    both = {*made[f"{prefix}/load-balancer-attributes"].split(",")}
    assert both == {idle, "routing.http2.enabled=true", "access_logs.s3.prefix=a=b"}
    assert made[f"{prefix}/target-group-attributes"] == f"{delay},load_balancing.algorithm.type=round_robin"
    assert made[f"{prefix}/ssl-policy"] == "ELBSecurityPolicy-TLS13-1-2-2021-06"
    own = at("ingress.annotations", {f"{prefix}/ssl-policy": "mine"})
    assert annotations("Ingress")(render(merged(ALB, own)))[f"{prefix}/ssl-policy"] == "mine"


@pytest.mark.parametrize(
    ("ingress", "num_bytes"),
    [
        ({}, 10485760),
        ({"batch": None}, 10485760),
        ({"max_body_bytes": 1000, "batch": {"files": "s3://b/p"}}, (200 << 20) + (64 << 10)),
        ({"batch": {"files": "s3://b/p", "max_file_bytes": 1 << 30}}, (1 << 30) + (64 << 10)),
        ({"max_body_bytes": 2 << 30, "batch": {"files": "s3://b/p"}}, 2 << 30),
    ],
    ids=str,
)
def test_nginx_takes_the_largest_body_and_the_largest_upload_with_its_form(ingress: dict[str, Any], num_bytes: int) -> None:
    made = render(merged(at("ingress", {"enabled": True, "className": "nginx"}), at("config.ingress", ingress)))
    assert annotations("Ingress")(made)["nginx.ingress.kubernetes.io/proxy-body-size"] == str(num_bytes)
