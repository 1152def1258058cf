"""A load test adds a worker pod, its end takes it away again, and no request notices."""

import json
import subprocess
from collections import Counter

import pytest

from tests.cluster.kube import kubectl, wait_until
from tests.cluster.release import CLIENT_NAMESPACE, MODEL, NAMESPACE, Release

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

PASS, INVALID = 0, 3  # invalid: the generator shares two cores with all it asks, and its own lag is not the question here
RATE, DURATION_S = 3, 75
NUM_REQUESTS = RATE * DURATION_S
SCENARIO = f"""
name: scale
arrival: {{law: poisson, rate: {RATE}}}
requests: [{{endpoint: chat, prompt: text, input_tokens: {{mean: 32}}, output_tokens: {{mean: 256}}}}]
duration_s: {DURATION_S}
warmup_s: 5
"""


def test_a_load_test_adds_a_worker_pod_and_removes_it_again(release: Release) -> None:
    def num_models() -> int:
        return len(release.ready_pods("model"))

    wait_until("the smallest fleet", lambda: num_models() == 1)
    inside = ("exec", "-i", "-n", CLIENT_NAMESPACE, "client", "--")
    kubectl(*inside, "sh", "-c", 'cat > /tmp/scale.yaml; printf %s "$0" > /tmp/key', release.api_key(), stdin=SCENARIO)
    target = ("--target", release.url, "--model", MODEL, "--api-key-file", "/tmp/key", "--out", "/tmp/scale", "--no-report")
    load = subprocess.Popen(
        ["kubectl", *inside, "serve-app-loadtest", "run", "/tmp/scale.yaml", *target], stdout=subprocess.PIPE, text=True
    )
    with load:
        wait_until("a second model pod, or the end of the load", lambda: num_models() >= 2 or load.poll() is not None)
        assert num_models() >= 2
        said, _ = load.communicate()
    assert load.returncode in (PASS, INVALID), said
    rows = kubectl(*inside, "cat", "/tmp/scale/rows.jsonl").splitlines()
    states = Counter(json.loads(row)["state"] for row in rows)
    assert set(states) == {"ok"}, states
    assert len(rows) > NUM_REQUESTS / 2
    wait_until("one model pod again", lambda: num_models() == 1 and len(release.pods("model")) == 1)
    assert kubectl("get", "events", "-n", NAMESPACE, "--field-selector", "reason=Failed") == ""
