"""The pages' pod is off by default, is a client of the release's Service, and is replaced without touching the Ray cluster."""

from tests.chart.render import at, merged, render

ON = at("ui.enabled", True)


def test_there_is_none_unless_asked_for() -> None:
    made = render()
    assert "ui" not in made.of("Deployment")
    assert "ui" not in made.of("Service")
    assert not {"ui", "ui-to-ingress"} & made.of("NetworkPolicy").keys()


def test_the_pages_ask_the_releases_service_by_the_command_of_the_image() -> None:
    made = render(merged(ON, at("service.port", 8080)))
    (container,) = made.of("Deployment")["ui"]["spec"]["template"]["spec"]["containers"]
    assert [*container["command"], *container["args"]] == [
        *("serve-app", "ui", "--host", "0.0.0.0", "--port", "8011", "--url", "http://demo:8080"),
    ]
    assert container["image"] == made.container("ingress")["image"]
    assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {"/healthz"}


def test_its_service_finds_its_pod_and_the_other_service_does_not() -> None:
    made = render(merged(ON, at("ui.port", 8081)))
    labels = made.of("Deployment")["ui"]["spec"]["template"]["metadata"]["labels"]
    service = made.of("Service")["ui"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert service["ports"] == [{"name": "http", "port": 8081, "targetPort": "http"}]
    assert not made.of("Service")[""]["spec"]["selector"].items() <= labels.items()


def test_the_pages_change_nothing_of_the_ray_cluster() -> None:
    assert render(ON).service == render().service
