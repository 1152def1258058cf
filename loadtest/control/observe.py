"""The observer scrapes a target's Prometheus series, Ray Serve's replicas and Kubernetes pods, under names common to all targets.

    running, waiting, held         requests: in running batches, in waiting queues, unfinished in the front end
    kv_usage                       used share of the fullest KV cache, 0..1
    preemptions, requests_ok, requests_failed, requests_rejected, prompt_tokens, output_tokens          counters
    queue_s_sum, queue_s_count, and so prefill_s, decode_s, ttft_s                                      histograms' totals
    replicas_desired/<deployment>, replicas_ready/<deployment>                 of Ray Serve, or of serve-app's /fleet
    pods_ready, pods_pending (not placed, or its image is on the way), pods_starting (runs, not ready)  of Kubernetes

Counters are sums over models, engines and replicas. A name whose series the target does not have is left out.
Sources: vllm/v1/metrics/loggers.py; `ray_vllm_*`, the same through Ray's agent; serve_app_* of our ingress;
ray/serve/schema.py (ServeInstanceDetails).
"""

import json
import math
import os
import re
import ssl
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

import httpx

from loadtest.plan.scenario import Observe
from loadtest.records import ServerSample
from loadtest.wire.target import Target, get_within
from loadtest.wording import is_writable, shown

TIMEOUT_S = 2.0
MAX_PODS = 500
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which the kubelet puts a pod's namespace, its token and the API server's authority."""

_HISTOGRAMS = {
    "queue_s": "request_queue_time_seconds",
    "prefill_s": "request_prefill_time_seconds",
    "decode_s": "request_decode_time_seconds",
    "ttft_s": "time_to_first_token_seconds",
}
# Name -> candidate series, best first: name without vLLM's prefix and `_total`, and required labels. The first that exists counts.
_SERIES: dict[str, tuple[tuple[str, str], ...]] = {
    "running": (("num_requests_running", ""),),
    "waiting": (("num_requests_waiting", ""),),
    "held": (("serve_app_replica_held", ""),),
    "kv_usage": (("kv_cache_usage_perc", ""),),
    "preemptions": (("num_preemptions", ""),),
    "requests_ok": (
        ("request_success", 'finished_reason="(stop|length|repetition)"'),
        ("serve_app_requests", 'outcome="complete"'),
    ),
    "requests_failed": (("serve_app_requests", 'outcome="failed"'), ("request_success", 'finished_reason="error"')),
    "requests_rejected": (("serve_app_requests", 'outcome="rejected"'), ("admission_rejections", "")),
    "prompt_tokens": (("prompt_tokens", ""),),
    "output_tokens": (("generation_tokens", ""),),
    **{f"{name}_{part}": ((f"{series}_{part}", ""),) for name, series in _HISTOGRAMS.items() for part in ("sum", "count")},
}
# Only the needed lines of a page, which can have thousands, are parsed: parsing competes with the load generator for the CPU.
_LINE = re.compile(
    rf"^(?:ray_)?(?:vllm[:_])?(?P<series>{'|'.join(series for ways in _SERIES.values() for series, _ in ways)})(?P<total>_total)?"
    r'(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (?P<value>\S+)',
    re.MULTILINE,
)


def metrics_values(page: str) -> dict[str, float]:
    """Return the values of a page in Prometheus's text format, by the common names."""
    found: defaultdict[tuple[str, bool], list[tuple[str, float]]] = defaultdict(list)
    for match in _LINE.finditer(page):
        value = float(match["value"])
        if math.isfinite(value):
            found[match["series"], match["total"] is not None].append((match["labels"] or "", value))
    values = {}
    for name, ways in _SERIES.items():
        for series, labels in ways:
            # Ray's agent can export a counter a second time, as a gauge without the suffix.
            if lines := found.get((series, True)) or found.get((series, False)):
                fitting = [value for text, value in lines if re.search(labels, text)]
                values[name] = max(fitting, default=0.0) if name == "kv_usage" else sum(fitting)
                break
    return values


def serve_values(details: Mapping[str, Any]) -> dict[str, float]:
    """Return desired and ready replicas from the answer to GET /api/serve/applications/ of Ray's dashboard."""
    values: defaultdict[str, float] = defaultdict(float)
    for application in details["applications"].values():
        for name, deployment in application["deployments"].items():
            values[f"replicas_desired/{name}"] += deployment["target_num_replicas"]
            values[f"replicas_ready/{name}"] += sum(replica["state"] == "RUNNING" for replica in deployment["replicas"])
    return dict(values)


def fleet_values(report: Mapping[str, Any]) -> dict[str, float]:
    """Return desired and ready replicas from the answer of a serve-app ingress to GET /fleet.

    Desired is the autoscaler's last decision; for a model without a decision, the number of existing replicas.
    """
    replicas = [member for member in report["members"] if member["role"] == "replica"]
    ingresses = [member for member in report["members"] if member["role"] == "ingress"]
    models = {member["model"] for member in replicas} | {name for i in ingresses for name in i["load"].get("models", {})}
    decided = {note["model"]: float(note["after"]) for note in report["decisions"]}
    values = {}
    for model in models:
        mine = [member for member in replicas if member["model"] == model]
        values[f"replicas_desired/replica-{model}"] = decided.get(model, float(len(mine)))
        values[f"replicas_ready/replica-{model}"] = float(sum(member["state"] == "ready" for member in mine))
    return values


def pod_values(pods: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the counts of pods from the Kubernetes API's list; pods that are ending or have ended are not counted."""
    values = {"pods_ready": 0.0, "pods_pending": 0.0, "pods_starting": 0.0}
    for pod in pods:
        status = pod["status"]
        if "deletionTimestamp" in pod["metadata"]:
            continue
        if status["phase"] == "Pending":
            values["pods_pending"] += 1
        elif status["phase"] == "Running":
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ()))
            values["pods_ready" if ready else "pods_starting"] += 1
    return values


def ray_token() -> str:
    """Return the token for Ray's dashboard from the places where Ray looks for it: environment, named file, the user's file."""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return file.read_text().strip() if file.is_file() else ""


class Observer:
    """An observer of the sources that a scenario names. It blocks: call it from a thread (or a greenlet), not from an event loop."""

    def __init__(self, observe: Observe, target: Target) -> None:
        self._observe = observe
        self._metrics_url = observe.metrics_url or f"{target.root}/metrics"
        self._fleet_url, self._target_headers = f"{target.root}/fleet", target.headers
        own = urlsplit(self._metrics_url)[:2] == urlsplit(target.root)[:2]
        self._metrics_headers = target.headers if own else None  # only the target may see the key
        # Like the load: without a proxy, and with the system's certificates.
        self._http = httpx.Client(timeout=TIMEOUT_S, trust_env=False, follow_redirects=True, verify=ssl.create_default_context())
        self._kubernetes: httpx.Client | None = None
        self._replicas_from: Literal["serve", "fleet"] | None = None
        self._has_asked_fleet = False
        """The source of replicas: the dashboard or, in its place, /fleet, whichever answered first."""

    def close(self) -> None:
        self._http.close()
        if self._kubernetes:
            self._kubernetes.close()

    def sample(self, t_s: float) -> list[ServerSample]:
        """Return one sample per source, in a few seconds at most. Never raises: a failure is in the sample's ``error``."""
        samples = []
        if self._metrics_url != "none":
            samples.append(_sampled(t_s, "metrics", self._metrics))
        if self._observe.serve_status:
            samples += self._replicas(t_s)
        if self._observe.fleet:
            samples.append(_sampled(t_s, "fleet", self._fleet))
        if self._observe.kubernetes_selector:
            samples.append(_sampled(t_s, "kubernetes", self._pods))
        return samples

    def _replicas(self, t_s: float) -> list[ServerSample]:
        """Ask Ray's dashboard. If that fails at the first sample, try the target's /fleet once, and use /fleet if it answers.

        After that the dashboard is not asked again: the two count different deployments, and a timeline of both would jump.
        """
        samples: list[ServerSample] = []
        if self._replicas_from != "fleet":
            samples.append(_sampled(t_s, "serve", self._serve))
            if not samples[0].error:
                self._replicas_from = "serve"
        may_stand_in = self._replicas_from == "fleet" or (self._replicas_from is None and not self._has_asked_fleet)
        if may_stand_in and not self._observe.fleet:
            self._has_asked_fleet = True
            told = _sampled(t_s, "fleet", self._fleet)
            if self._replicas_from == "fleet" or not told.error:  # without an answer so far, the target may have no /fleet
                self._replicas_from = "fleet"
                samples.append(told)
        return samples

    def _get(self, url: str, headers: Mapping[str, str] | None = None) -> str:
        return get_within(self._http, url, TIMEOUT_S, headers).raise_for_status().text

    def _metrics(self) -> dict[str, float]:
        values = metrics_values(self._get(self._metrics_url, self._metrics_headers))
        if not values:
            raise ValueError(f"{self._metrics_url} has no series of vLLM or serve-app")
        return values

    def _serve(self) -> dict[str, float]:
        url = f"{self._observe.ray_dashboard_url.rstrip('/')}/api/serve/applications/"
        token = ray_token()
        return serve_values(json.loads(self._get(url, {"Authorization": f"Bearer {token}"} if token else None)))

    def _fleet(self) -> dict[str, float]:
        return fleet_values(json.loads(self._get(self._fleet_url, self._target_headers)))

    def _pods(self) -> dict[str, float]:
        if self._kubernetes is None:
            self._kubernetes = _kubernetes_api(self._observe.kubernetes_url)
        namespace = self._observe.kubernetes_namespace or _of_account("namespace") or "default"
        asked = {"labelSelector": self._observe.kubernetes_selector, "limit": MAX_PODS}
        url = f"/api/v1/namespaces/{namespace}/pods?{urlencode(asked)}"
        token = "" if self._observe.kubernetes_url else _of_account("token")  # read each time: the kubelet replaces it
        headers = {"Authorization": f"Bearer {token}"} if token else None
        answer = get_within(self._kubernetes, url, TIMEOUT_S, headers)
        try:
            listed = answer.json()
            if answer.status_code == 200:
                return pod_values(listed["items"])
            raise RuntimeError(f"the Kubernetes API says {answer.status_code}: {listed['message']}")
        except (ValueError, TypeError, LookupError) as exc:
            address = self._kubernetes.base_url
            raise RuntimeError(f"{address} does not answer as the Kubernetes API: does `kubectl proxy` listen there?") from exc


def _sampled(
    t_s: float, source: Literal["metrics", "serve", "kubernetes", "fleet"], read: Callable[[], dict[str, float]]
) -> ServerSample:
    try:
        values = read()
        for name, value in values.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is {value:g}, which is not finite")
            if not is_writable(name):
                raise ValueError(f"the name {name!r} has half of a surrogate pair, which no file can hold")
        return ServerSample(t_s, source, values=values)
    except Exception as exc:  # the root of this source: a foreign client or answer may raise anything
        return ServerSample(t_s, source, error=shown(f"{type(exc).__name__}: {' '.join(str(exc).split())}"[:300], 300))


def _kubernetes_api(url: str) -> httpx.Client:
    """Return a client of the API server at ``url``, or of the cluster's own, verified with the pod's authority file.

    Raises:
        RuntimeError: This process is in no pod, and no address is set.
    """
    if url:
        return httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not host or not (ACCOUNT / "ca.crt").is_file():
        raise RuntimeError(
            "outside a pod kubernetes_selector needs kubernetes_url: http://127.0.0.1:8001, where `kubectl proxy` runs"
        )
    address = f"[{host}]" if ":" in host else host
    authority = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    return httpx.Client(base_url=f"https://{address}:{port}", timeout=TIMEOUT_S, trust_env=False, verify=authority)


def _of_account(name: str) -> str:
    file = ACCOUNT / name
    return file.read_text().strip() if file.is_file() else ""
