"""This module runs a load test by the chart `helm/loadtest`: its Jobs, in a namespace of their own, and their records."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from loadtest.proof.selftest.bench import ABOUT_TIME
from tests.cluster.kube import apply, get, kubectl, run, wait_until
from tests.cluster.release import CHART, HERE, Release

NAME, NAMESPACE = "load", "serve-app-load"
# Run in the report's pod: everything of the one run that its web server shows.
FETCH = """
import json, re, urllib.request
def page(path): return urllib.request.urlopen("http://127.0.0.1:8090/" + path, timeout=20).read().decode()
(run,) = re.findall(r'href="(load-1[^"/]*/)"', page(""))
names = ("summary.json", "autoscale.json", "rows.jsonl", "report.html")
print(json.dumps({name: page(run + name) for name in names}))
"""


@dataclass(frozen=True)
class Result:
    """The records of a run, as the report's pod serves them."""

    files: dict[str, str] = field(repr=False)

    def failed_gates(self) -> set[str]:
        """Return the gates that failed, but for those about time: the machine has everything else on it."""
        gates = json.loads(self.files["summary.json"])["gates"]
        return {gate["name"] for gate in gates if not gate["ok"]} - ABOUT_TIME

    def states(self) -> set[str]:
        """Return how the requests ended."""
        return {json.loads(line)["state"] for line in self.files["rows.jsonl"].splitlines()}

    def ready_pods(self) -> set[int]:
        """Return how many ready pods the run saw the target have, at one time or another."""
        told = json.loads(self.files["autoscale.json"])["timeline"]["pods_ready"]
        return {int(count) for count in told if count is not None}


@contextmanager
def load_test(release: Release) -> Iterator["LoadTest"]:
    """One run against the release while the block lasts; nothing of it stays."""
    load = LoadTest(release)
    try:
        load.start()
        yield load
    finally:
        run("helm", "uninstall", NAME, "-n", NAMESPACE, "--ignore-not-found")  # it has a Role in the target's namespace, too
        kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")


class LoadTest:
    """One run by the values of `load.yaml`."""

    def __init__(self, release: Release) -> None:
        self._release = release

    def start(self) -> None:
        """Make namespace, key and volume, and install the chart."""
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        keys = {"apiVersion": "v1", "kind": "Secret", "stringData": {"keys": self._release.api_key()}}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        apply(
            {**keys, "metadata": {"name": "demo-api-keys", "namespace": NAMESPACE}},
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "results", "namespace": NAMESPACE},
                "spec": claim,
            },
        )
        self._give_volume_to_its_user()
        chart, images = CHART.parent / "loadtest", self._release.images.values()[:4]
        run("helm", "install", NAME, str(chart), "-n", NAMESPACE, "-f", str(HERE / "load.yaml"), *images)

    def _give_volume_to_its_user(self) -> None:
        """Volumes of small clusters are directories of a node, which belong to root and ignore `fsGroup`."""
        chown = {
            "name": "chown",
            "image": self._release.images.app,
            "command": ["chown", "10001", "/results"],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "results", "mountPath": "/results"}],
        }
        volume = {"name": "results", "persistentVolumeClaim": {"claimName": "results"}}
        spec = {"containers": [chown], "volumes": [volume], "restartPolicy": "Never"}
        apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "chown", "namespace": NAMESPACE}, "spec": spec})
        wait_until("the volume's owner", lambda: get("pod", "chown", "-n", NAMESPACE)["status"]["phase"] == "Succeeded")
        kubectl("delete", "pod", "chown", "-n", NAMESPACE)

    def require_restricted(self) -> None:
        """Raises AssertionError if Pod Security `restricted` would refuse one of the pods."""
        label = "pod-security.kubernetes.io/enforce=restricted"
        warned = run("bash", "-c", f"kubectl label --dry-run=server --overwrite namespace {NAMESPACE} {label} 2>&1")
        assert "violate" not in warned, warned

    def has_ended(self) -> bool:
        """Whether the master's Job has a verdict, whichever."""
        conditions = get("job", f"{NAME}-1", "-n", NAMESPACE)["status"].get("conditions", [])
        return any(c["type"] in ("Complete", "Failed") and c["status"] == "True" for c in conditions)

    def result(self) -> Result:
        """Return what the run left."""
        return Result(
            json.loads(kubectl("exec", "-i", "-n", NAMESPACE, f"deploy/{NAME}-report", "--", "python", "-", stdin=FETCH))
        )
