"""The configuration of a fleet that is started for one job."""

from serve_app.batch.fleet_process import _own


def test_a_fleet_of_a_job_has_a_name_and_a_port_of_its_own_and_no_pages() -> None:
    """`make run`, which the same file drives, may serve beside it."""
    given = {"models": {"a": {"model": "some/model"}}, "name": "mine", "ingress": {"port": 8010}, "ui": {"port": 8011}}
    mapping, settings = _own(given, 0)
    assert (settings.ui, settings.name == "mine", settings.ingress.port == 8010) == (None, False, False)
    assert mapping == {"models": given["models"], "name": settings.name, "ingress": {"port": settings.ingress.port}}
