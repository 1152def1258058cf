"""Every check across values of the chart loadtest works, and agrees with the kit's own plan."""

from typing import Any

import pytest

from loadtest.judge.plan import make_plan
from loadtest.plan.scenario import parse_scenario
from loadtest.plan.schedule import make_schedule
from tests.chart.loadtest_chart import (
    CHART,
    CI_FILES,
    KEY,
    PODS,
    S3,
    SCENARIO,
    WEB,
    master,
    render,
    render_file,
    scenario,
    worker,
)
from tests.chart.render import Refused, at, merged
from tests.chart.render import render as render_chart


def arriving(**arrival: Any) -> dict[str, Any]:
    return at("scenario.arrival", arrival)


CHECKS: list[tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
    ("no target", at("target.url", ""), ("target.url is empty", "target.urlSecretKey"), {}),
    (
        "two targets",
        at("target.urlSecretKey", "u"),
        ("http://demo", "is u"),
        merged(at("target.url", ""), KEY, at("target.urlSecretKey", "u")),
    ),
    ("a target in no secret", at("target", {"url": "", "urlSecretKey": "u"}), ("is u", "existingSecret is empty"), {}),
    (
        "workers of the scenario",
        merged(at("scenario.workers", 2), at("workers.replicas", 3)),
        ("scenario.workers is 2", "workers.replicas is 3"),
        merged(at("scenario.workers", 3), at("workers.replicas", 3)),
    ),
    *[
        (
            f"fault {action}",
            at("scenario.faults", [{"at_s": 1, "action": action}]),
            ("scenario.faults[0].action", action),
            at("scenario.faults", [{"at_s": 1, "action": "command", "command": ["true"]}]),
        )
        for action in ("kill", "stop", "cut-link")
    ],
    (
        "a deadline before the end",
        merged(at("job.activeDeadlineSeconds", 1099), at("scenario", {"duration_s": 150, "drain_s": 50})),
        ("1099", "duration_s 150", "drain_s 50", "workersWaitSeconds 600", "1100"),
        merged(at("job.activeDeadlineSeconds", 1100), at("scenario", {"duration_s": 150, "drain_s": 50})),
    ),
    (
        "too few workers for the rate",
        at("scenario.arrival.rate", 81),
        ("workers.replicas is 1", "81 requests/s", "maxRate 80", "to 2 or more"),
        at("scenario.arrival.rate", 80),
    ),
    (
        "a worker that is trusted with less",
        merged(at("scenario.arrival.rate", 21), at("workers.maxRate", 20)),
        ("21 requests/s", "maxRate 20"),
        merged(at("scenario.arrival.rate", 20), at("workers.maxRate", 20)),
    ),
    (
        "too few workers for the tokens",
        merged(at("scenario.arrival.rate", 41), at("scenario.requests", [{"output_tokens": {"mean": 256}}])),
        ("41 requests/s of 256 tokens", "to 2 or more"),
        merged(at("scenario.arrival.rate", 40), at("scenario.requests", [{"output_tokens": {"mean": 256}}])),
    ),
    (
        "too few workers for the peak",
        arriving(law="flash-crowd", rate=1, peak_rate=161, at_s=20),
        ("161", "to 3 or more"),
        arriving(law="flash-crowd", rate=1, peak_rate=80, at_s=20),
    ),
    (
        "too few workers for the day",
        arriving(law="diurnal", rate=60, amplitude=0.5, period_s=60),
        ("90 requests/s", "to 2 or more"),
        arriving(law="diurnal", rate=60, amplitude=0.3, period_s=60),
    ),
    (
        "results that vanish",
        at("results.persistence.enabled", False),
        ("persistence.enabled is false", "s3.uri is empty", "vanish"),
        merged(WEB, at("results.persistence.enabled", False)),
    ),
    (
        "an upload that nobody does",
        merged(WEB, at("results.s3.uri", "s3://b/p")),
        ("s3://b/p", "mode is web"),
        at("results.s3.uri", "s3://b/p"),
    ),
    *[
        (
            f"{path} in vain",
            at(path, value),
            (f"{path} is {value}, but results.s3.uri is empty: ", "remove the former"),
            merged(S3, at(path, value)),
        )
        for path, value in (
            ("results.s3.endpoint", "http://s"),
            ("results.s3.region", "eu-west-1"),
        )
    ],
    (
        "a claim in vain",
        merged(S3, at("results.persistence.existingClaim", "c")),
        ("results.persistence.existingClaim is c, but results.persistence.enabled is false: ",),
        at("results.persistence.existingClaim", "c"),
    ),
    *[
        (
            f"more than the limit of {path}",
            at(f"{path}.resources.requests.memory", "3Gi"),
            (f"{path}.resources.requests.memory is 3Gi, but {path}.resources.limits.memory is ", "raise the latter"),
            at(f"{path}.resources", {"requests": {"memory": "3Gi"}, "limits": {"memory": "3072Mi"}}),
        )
        for path in ("master", "workers", "results.s3", "report", "test")
    ],
    *[
        (
            f"a label that selects: {label}",
            at("workers.podLabels", {label: "x"}),
            (f"workers.podLabels has {label}", "remove it"),
            at("workers.podLabels", {"app.kubernetes.io/part-of": "x"}),
        )
        for label in ("app.kubernetes.io/component", "loadtest/run")
    ],
    (
        "a mount of no volume",
        at("extraVolumeMounts", [{"name": "v", "mountPath": "/v"}]),
        ("extraVolumeMounts mounts v at /v, but extraVolumes has no volume of that name",),
        at("extraVolumes", [{"name": "v", "emptyDir": {}}]),
    ),
    *[
        (
            f"latest of {image}",
            at(f"{image}.tag", "latest"),
            (f"{image}.tag is latest", "digest is empty"),
            at(image, {"tag": "latest", "digest": "sha256:" + "a" * 64}),
        )
        for image in ("image", "results.s3.image")
    ],
    ("two tags", at("image.repository", "h:5000/i:1"), ("h:5000/i:1", "image.tag"), at("image.repository", "h:5000/i")),
    (
        "a key in the environment",
        at("extraEnv", [{"name": "LOADTEST_API_KEY", "value": "x"}]),
        ("LOADTEST_API_KEY", "target.existingSecret"),
        at("extraEnv", [{"name": "SSL_CERT_FILE", "value": "/ca/ca.pem"}]),
    ),
    (
        "credentials in the address",
        at("target.url", "https://u:p@h"),
        ("target.url has credentials", "urlSecretKey"),
        at("target.url", "https://h"),
    ),
    (
        "a key in the scenario",
        at("scenario.requests", [{"extra_body": {"key": "sk-" + "a" * 24}}]),
        ("looks like a secret (sk-aaa", "Secret"),
        at("scenario.requests", [{"extra_body": {"user": "u"}}]),
    ),
]


@pytest.mark.parametrize(("name", "broken", "shown", "kept"), CHECKS, ids=[name for name, *_ in CHECKS])
def test_what_cannot_work_is_refused_with_both_values_and_the_way_out(
    name: str, broken: dict[str, Any], shown: tuple[str, ...], kept: dict[str, Any]
) -> None:
    with pytest.raises(Refused) as refusal:
        render(broken)
    assert [value for value in shown if value not in str(refusal.value)] == []
    render(kept)


def test_what_the_chart_gives_its_pods_is_taken() -> None:
    for mode in ("job", "web"):
        found = render(merged(KEY, PODS, at("mode", mode)))
        pods = [master(found), worker(found)]
        own = [
            c
            for pod in pods
            for c in [*pod.get("initContainers", []), *pod["containers"]]
            if c["name"] in ("run", "master", "worker")
        ]
        names = {
            "extraEnv": {v["name"] for c in own for v in c["env"]},
            "extraVolumes": {v["name"] for pod in pods for v in pod["volumes"]},
            "extraVolumeMounts": {m["mountPath"] for c in own for m in c["volumeMounts"]},
        }
        assert [len(taken) for taken in names.values()] == [3 if mode == "job" else 2, 5, 5]
        for key, taken in names.items():
            for name in taken:
                entry = {"name": "v", "mountPath": name} if key == "extraVolumeMounts" else {"name": name}
                with pytest.raises(Refused, match=rf"{key} has the (name|mountPath) {name}, .*choose another"):
                    render(at(key, [entry]))


@pytest.mark.parametrize(
    ("clients", "workers", "shown"),
    [
        (
            300,
            1,
            "workers.replicas is 1, but scenario.arrival.concurrency is 300, .* 200 open streams: set workers.replicas to 2 or more",
        ),
        (2, 3, "workers.replicas is 3, but scenario.arrival.concurrency is 2: .* set workers.replicas to 2 or less"),
    ],
)
def test_clients_and_workers_of_a_closed_loop_must_fit(clients: int, workers: int, shown: str) -> None:
    def loop(workers: int) -> dict[str, Any]:
        arrival = {"law": "closed", "concurrency": clients, "max_requests": 1000}
        return at("target.url", "http://demo") | {"scenario": SCENARIO | {"arrival": arrival}} | at("workers.replicas", workers)

    with pytest.raises(Refused, match=shown):
        render_chart(loop(workers), chart=CHART)
    render_chart(loop(2), chart=CHART)


def test_an_empty_scenario_is_refused_with_an_example() -> None:
    with pytest.raises(Refused, match=r"scenario is empty: .*docs/loadtest\.md, for example"):
        render_chart(at("target.url", "http://demo"), chart=CHART)


def test_a_release_whose_names_would_not_fit_is_refused() -> None:
    with pytest.raises(Refused, match="37 characters"):
        render(release="r" * 37)
    names = [o["metadata"]["name"] for o in render(at("job.run", "x" * 15), release="r" * 36).objects]
    assert max(map(len, names)) <= 63


ARRIVALS: list[dict[str, Any]] = [
    {"law": "constant", "rate": 100},
    {"law": "poisson", "rate": 100},
    {"law": "gamma", "rate": 100, "cv": 2},
    {"law": "on-off", "rate": 100, "off_rate": 1, "on_s": 10, "off_s": 10},
    {"law": "ramp", "rate": 1, "to_rate": 100},
    {"law": "step", "rate": 1, "to_rate": 100, "at_s": 10},
    {"law": "flash-crowd", "rate": 1, "peak_rate": 100, "at_s": 5, "hold_s": 20},
    {"law": "diurnal", "rate": 60, "amplitude": 0.7, "period_s": 60},
    {"law": "closed", "concurrency": 300, "max_requests": 1000},
]


@pytest.mark.parametrize("arrival", ARRIVALS, ids=[a["law"] for a in ARRIVALS])
def test_the_chart_refuses_too_few_workers_as_the_kits_plan_does_and_never_before(arrival: dict[str, Any]) -> None:
    values = SCENARIO | {"arrival": arrival, "requests": [{"output_tokens": {"dist": "uniform", "min": 1, "max": 300}}]}
    loaded = parse_scenario(values)
    needed = make_plan(loaded, make_schedule(loaded)).workers_needed
    assert needed >= 2
    chosen = at("target.url", "http://demo") | {"scenario": values}
    render_chart(chosen | at("workers.replicas", needed), chart=CHART)
    with pytest.raises(Refused, match=r"set workers\.replicas to 2 or more"):
        render_chart(chosen, chart=CHART)


@pytest.mark.parametrize("file", CI_FILES, ids=lambda f: f.stem)
def test_the_kit_accepts_every_scenario_and_has_workers_enough(file: Any) -> None:
    found = render_file(file)
    loaded = parse_scenario(scenario(found))
    jobs = found.of("Job")
    replicas = jobs["1-workers"]["spec"]["completions"] if jobs else found.of("Deployment")["worker"]["spec"]["replicas"]
    assert make_plan(loaded, make_schedule(loaded)).workers_needed <= replicas
    assert worker(found)["containers"][0]["resources"]["limits"]["cpu"] == "2"


def test_the_schema_names_the_key_that_is_wrong() -> None:
    with pytest.raises(Refused, match=r"(?s)/scenario/arrival': additional properties 'rat' not allowed") as refusal:
        render(at("scenario.arrival.rat", 1))
    assert "gamma" not in str(refusal.value)
    with pytest.raises(Refused, match=r"/scenario/arrival/law': value must be one of"):
        render(at("scenario.arrival.law", "poison"))
    render(at("scenario.slo", "ttft_p99=1s"))
    render(at("scenario.slo", {"limits": [{"metric": "ttft", "quantile": 0.99, "limit_s": 1}]}))
