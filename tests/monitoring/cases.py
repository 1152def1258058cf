"""These cases have for each alert: series with which it fires, the sentence that it then says, and series with which it must not fire.

Series are in promtool's notation, a value each minute, or each ten minutes where ``slow``: ``0+6x60`` begins at 0 and grows by 6
sixty times.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

JOB = 'job="local/serve-app-ingress"'
M = f'{JOB},model="chat"'
MODEL = {"model": "chat"}
R = f'{M},replica="a"'
T = f'{M},tenant="team"'
TEAM = MODEL | {"tenant": "team"}
VLLM = f'{JOB},model_name="chat"'
Series = Mapping[str, str]


class Case(NamedTuple):
    """``at``: minutes after the beginning. ``labels``: of the alert, beside job and severity. ``slow``: it takes days.

    ``calm_too``: other series with which it must not fire.
    """

    fires: Series
    summary: str
    calm: Series
    at: int = 60
    labels: Mapping[str, str] = MODEL
    slow: bool = False
    calm_too: Series | None = None


def requests(bad: str, good: str) -> Series:
    """Return counters of failed and complete requests."""
    return {
        f'serve_app_requests_total{{{M},outcome="failed"}}': bad,
        f'serve_app_requests_total{{{M},outcome="complete"}}': good,
    }


def latencies(series: str, within: str, all_of_them: str, limit: str, labels: str = VLLM) -> Series:
    """Return a histogram with one bucket below infinity, and requests enough for an objective to count."""
    return {
        f'{series}_bucket{{{labels},le="{limit}"}}': within,
        f"{series}_count{{{labels}}}": all_of_them,
        **requests("0x300", "0+10x300"),
    }


def first_tokens(within: str, all_of_them: str) -> Series:
    """Return the times to first token of interactive requests, of which so many are within the limit. All others are late."""
    late = [latencies(TTFT, "0x300", "0+90x300", "2.5", f'{M},priority="{priority}"') for priority in ("batch", "background")]
    return {**late[0], **late[1], **latencies(TTFT, within, all_of_them, "2.5", f'{M},priority="interactive"')}


def replica(series: str, values: str) -> Series:
    return {f"serve_app_replica_{series}{{{R}}}": values}


def bound(least: int, most: int) -> Series:
    return {
        f'serve_app_replica_bound{{{M},bound="min"}}': f"{least}x300",
        f'serve_app_replica_bound{{{M},bound="max"}}': f"{most}x300",
    }


def desired(values: str, *, controller: str = "running") -> Series:
    """Return what the autoscaler wants; the series of an ended controller stay for a while."""
    return {f'ray_serve_app_autoscaling_desired{{job="local/serve-app-ray",model="chat",WorkerId="{controller}"}}': values}


def waiting(values: str, *, low: str = "0x90", low_at_replicas: str = "0x90") -> Series:
    """Return the requests without a replica. ``low``: how many of them are of lower priorities, and how many such replicas have."""
    return {
        f"serve_app_waiting_requests{{{M}}}": values,
        f'serve_app_low_priority_waiting{{{M},at="ingress"}}': low,
        f'serve_app_low_priority_waiting{{{M},at="replica"}}': low_at_replicas,
    }


def waits(longest: str, limit: str) -> Series:
    """Return the waits of a tenant for a model."""
    return {
        f'serve_app_tenant_longest_wait_seconds{{{T},instance="a"}}': longest,
        f'serve_app_tenant_longest_wait_seconds{{{T},instance="b"}}': "1x90",
        f'serve_app_tenant_wait_limit_seconds{{{T},instance="a"}}': limit,
    }


def asked(**outcomes: str) -> Series:
    """Return the counters of a tenant's requests, which it sends with two keys. A quota refuses them before their model is known."""
    without_model = T.replace('"chat"', '""')
    return {
        f'serve_app_key_requests_total{{{without_model if outcome == "over_quota" else T},key="{key}",outcome="{outcome}"}}': values
        for key in ("k1", "k2")
        for outcome, values in outcomes.items()
    }


def gpu(field: str, values: str, *, of: str = "serve-app") -> Series:
    """Return a GPU on the node n1 as the exporter tells it, and the pods of the release ``of``, to one of which it belongs."""
    return {
        f'DCGM_FI_DEV_{field}{{job="dcgm",exported_namespace="local",exported_pod="{of}-worker-x",Hostname="n1",gpu="0"}}': values,
        f'up{{job="local/{of}-ray",namespace="local",pod="{of}-worker-x",endpoint="metrics"}}': "1x90",
        f'up{{job="local/{of}-ray",namespace="local",pod="{of}-worker-x",endpoint="other"}}': "0x90",
    }


def memory(used: str, total: str, pod: str, release: str = "serve-app") -> Series:
    """Return what Ray's agent in a pod reports of its container's memory, in GiB."""
    labels = f'job="local/{release}-ray",pod="{pod}",endpoint="metrics",RayNodeType="worker"'
    return {f"ray_node_mem_used{{{labels}}}": in_bytes(used), f"ray_node_mem_total{{{labels}}}": in_bytes(total)}


def in_bytes(gib: str) -> str:
    """Return a series in bytes that is given in GiB."""
    return re.sub(r"(?<![x\d])\d+", lambda found: str(int(found[0]) * 2**30), gib)


GPU = {"job": "local/serve-app-ray", "Hostname": "n1", "gpu": "0"}
TTFT, ITL = "serve_app_ttft_seconds", "vllm:inter_token_latency_seconds"

CASES: dict[str, Case] = {
    "ServeAppDown": Case({}, "No ingress of serve-app answers Prometheus.", {f"up{{{JOB}}}": "1x90"}, labels={}),
    "ServeAppNoReplica": Case(
        {
            **waiting("0x90"),
            **bound(1, 2),
            **replica("draining", "1x90"),
            **desired("1x90"),
            **desired("0x90", controller="ended"),
        },
        "No replica of chat takes requests, according to all 1 ingresses.",
        {**waiting("0x90"), **bound(0, 2)},
        # Unloaded by an operator.
        calm_too={**waiting("0x90"), **bound(1, 2), **desired("0x90")},
    ),
    # 2 % of the requests: over 14.4 times 0.1 %.
    "ServeAppRequestsFail": Case(
        requests("0+2x90", "0+98x90"),
        "2% of the requests for chat fail or are rejected; the objective is 99.9% that do not.",
        requests("0+1x90", "0+199x90"),
    ),
    # 0.4 % for a day: over 3 times 0.1 %, below 6 times.
    "ServeAppRequestsFailSlowly": Case(
        requests("0+4x300", "0+996x300"),
        "0.4% of the requests for chat fail or are rejected, for hours; the objective is 99.9% that do not.",
        requests("0+1x300", "0+1999x300"),
        at=2 * 24 * 60,
        slow=True,
    ),
    "ServeAppFirstTokensAreLate": Case(
        first_tokens("0+2x90", "0+10x90"),
        "80% of the interactive answers of chat begin later than 2.5 s after the request; the objective is 95% that do not.",
        first_tokens("0+8x90", "0+10x90"),
    ),
    "ServeAppFirstTokensAreLateSlowly": Case(
        first_tokens("0+8x300", "0+10x300"),
        "20% of the interactive answers of chat begin later than 2.5 s after the request, for hours; the objective is 95% that do not.",
        first_tokens("0+97x300", "0+100x300"),
        at=2 * 24 * 60,
        slow=True,
    ),
    "ServeAppTokensAreLate": Case(
        latencies(ITL, "0+80x90", "0+100x90", "0.2"),
        "20% of the tokens of chat come later than 0.2 s after the previous token; the objective is 99% that do not.",
        latencies(ITL, "0+95x90", "0+100x90", "0.2"),
    ),
    "ServeAppTokensAreLateSlowly": Case(
        latencies(ITL, "0+96x300", "0+100x300", "0.2"),
        "4% of the tokens of chat come later than 0.2 s after the previous token, for hours; the objective is 99% that do not.",
        latencies(ITL, "0+995x300", "0+1000x300", "0.2"),
        at=2 * 24 * 60,
        slow=True,
    ),
    "ServeAppRequestsWait": Case(
        waiting("53x90", low="2x90"),
        "51 interactive requests for chat wait for a replica; replicas.max may be too low.",
        waiting("50x90"),
        calm_too=waiting("90x90", low="40x90"),
    ),
    "ServeAppQueueGrows": Case(
        waiting("1+2x90"),
        "The queue of chat grew by 20 interactive requests in 10 minutes, and was never empty.",
        waiting(" ".join(["0 9"] * 45)),
        calm_too=waiting("1+2x90", low="0+2x90"),
    ),
    "ServeAppAtMaxReplicas": Case(
        {**waiting("0x90", low_at_replicas="2x90"), **bound(1, 1), **replica("draining", "0x90"), **replica("waiting", "3x90")},
        "All 1 replicas that chat may have are running, and interactive requests still wait.",
        {**waiting("1x90"), **bound(1, 2), **replica("draining", "0x90"), **replica("waiting", "3x90")},
        calm_too={
            **waiting("1x90", low="1x90", low_at_replicas="4x90"),
            **bound(1, 1),
            **replica("draining", "0x90"),
            **replica("waiting", "3x90"),
        },
    ),
    "ServeAppRequestsAreRejected": Case(
        {f'serve_app_request_errors_total{{{M},reason="queue_full"}}': "0+2x90"},
        "20 requests for chat were rejected in 10 minutes: queue_full.",
        {f'serve_app_request_errors_total{{{M},reason="http_400"}}': "0+2x90"},
        labels=MODEL | {"reason": "queue_full"},
    ),
    "ServeAppCacheIsFull": Case(
        replica("kv_usage", "0.96x90"),
        "Every replica of chat has used over 95 % of its KV cache for 10 minutes; engines preempt requests.",
        {**replica("kv_usage", "0.96x90"), f'serve_app_replica_kv_usage{{{M},replica="b"}}': "0.5x90"},
    ),
    "ServeAppDiskIsFull": Case(
        {f'serve_app_free_disk_bytes{{{JOB},instance="i"}}': "1073741824x90"},
        "1GiB are free below the temporary folder of the ingress i.",
        {f'serve_app_free_disk_bytes{{{JOB},instance="i"}}': "3000000000x90"},
        labels={"instance": "i"},
    ),
    "ServeAppBatchFolderIsFull": Case(
        {f"serve_app_batch_free_bytes{{{JOB}}}": "1073741824x90"},
        "1GiB are free in the folder of batches.",
        {f"serve_app_batch_free_bytes{{{JOB}}}": "0x90"},
        labels={},
    ),
    "ServeAppMemoryIsFull": Case(
        {**memory("18x90", "20x90", "demo-model"), **memory("3x90", "4x90", "demo-ingress")},
        "The pod demo-model has used 90% of its memory, and over 80 % for 10 minutes.",
        {**memory("18x55 15 18x40", "20x90", "demo-model"), **memory("18x90", "20x90", "other-model", release="serve-app-2")},
        labels={"job": "local/serve-app-ray", "pod": "demo-model"},
        calm_too=memory("109x90", "124x90", "keeps-kv"),
    ),
    "ServeAppReplicasAreLost": Case(
        {f"serve_app_resumptions_total{{{M}}}": "0+1x90"},
        "Streams of chat lost their replica and continued elsewhere, 15 times in 15 minutes.",
        {f"serve_app_resumptions_total{{{M}}}": "7x90"},
    ),
    "ServeAppEnginesAreLost": Case(
        {f'serve_app_engines_lost_total{{{M},reason="engine_dead",instance="{i}"}}': "0+0.1x90" for i in "ab"},
        "3 engines of chat were lost in 30 minutes: engine_dead.",
        {f'serve_app_engines_lost_total{{{M},reason="engine_dead",instance="{i}"}}': "0x50 1x40" for i in "ab"},
        labels=MODEL | {"reason": "engine_dead"},
    ),
    "ServeAppReplicasAreEjected": Case(
        {f'serve_app_links_lost_total{{{M},reason="unresponsive"}}': "0+0.2x90"},
        "An ingress ejected silent replicas of chat 6 times in 30 minutes.",
        {f'serve_app_links_lost_total{{{M},reason="said_goodbye"}}': "0+0.2x90"},
    ),
    "ServeAppDrainDoesNotEnd": Case(
        replica("draining", "1x90"),
        "The replica a of chat has drained for more than 900 s.",
        replica("draining", "0x48 1x14"),
        labels=MODEL | {"replica": "a"},
    ),
    "ServeAppEventLoopLags": Case(
        {
            f'serve_app_event_loop_lag_seconds_bucket{{{JOB},instance="i",le="{le}"}}': f"0+{n}x90"
            for le, n in (("0.1", 50), ("0.25", 100), ("+Inf", 100))
        },
        "The event loop of the ingress i is late by 220ms or more, one time in ten.",
        {
            f'serve_app_event_loop_lag_seconds_bucket{{{JOB},instance="i",le="{le}"}}': f"0+{n}x90"
            for le, n in (("0.1", 95), ("0.25", 100), ("+Inf", 100))
        },
        labels={"instance": "i"},
    ),
    "ServeAppRequestsAreQuarantined": Case(
        {f'serve_app_requests_total{{{M},outcome="quarantined"}}': "0x50 1x40"},
        "1 requests for chat were refused: requests like them ran when two engines were lost.",
        {f'serve_app_requests_total{{{M},outcome="blocked"}}': "0x50 1x40"},
    ),
    "ServeAppCanaryIsBad": Case(
        {f'serve_app_canary_state{{{JOB},model="next",of="chat",state="bad"}}': "1x90"},
        "The canary next did worse than chat, which answers all requests again.",
        {f'serve_app_canary_state{{{JOB},model="next",of="chat",state="good"}}': "1x90"},
        labels={"model": "next", "of": "chat"},
    ),
    "ServeAppBatchStandsStill": Case(
        {
            # Two ingresses that share a database tell the same batches.
            f'serve_app_batches{{{JOB},instance="a",status="in_progress"}}': "2x90",
            f'serve_app_batches{{{JOB},instance="b",status="in_progress"}}': "2x90",
            f'serve_app_batch_lines_total{{{JOB},outcome="ok"}}': "5x90",
        },
        "2 batches are in progress, and none of their lines was answered in 30 minutes.",
        {
            f'serve_app_batches{{{JOB},status="in_progress"}}': "2x90",
            f'serve_app_batch_lines_total{{{JOB},outcome="ok"}}': "0+1x90",
        },
        labels={},
    ),
    "ServeAppLedgerLosesLines": Case(
        {f'serve_app_ledger_lost_total{{{JOB},instance="i"}}': "0+2x90"},
        "The ingress i could not write 30 lines of its ledger in 15 minutes.",
        {f'serve_app_ledger_lost_total{{{JOB},instance="i"}}': "30x90"},
        labels={"instance": "i"},
    ),
    "ServeAppTenantIsStarved": Case(
        waits("61x90", "30x90"),
        "The oldest request of team for chat has waited for 1m 1s, over twice its limit.",
        waits("60x90", "30x90"),
        labels=TEAM,
        # For three minutes.
        calm_too=waits("1x56 90x33", "30x90"),
    ),
    "ServeAppTenantIsRefused": Case(
        asked(rejected="0+1x90", over_quota="0+2x90", complete="0+1x90", held_back="0+9x90"),
        "75% of the requests of team are refused, for an hour.",
        asked(rejected="0+3x90", complete="0+3x90"),
        labels={"tenant": "team"},
        # Few requests.
        calm_too=asked(rejected="0+0.3x90"),
    ),
    "ServeAppGpuFails": Case(
        gpu("XID_ERRORS", "0x50 79x40"),
        "The GPU 0 of n1 reported the error XID 79 to its driver, which a program does not cause.",
        {**gpu("XID_ERRORS", "0x30 13x30 31x30"), **gpu("XID_ERRORS", "79x90", of="serve-app-2")},
        labels=GPU,
    ),
    "ServeAppGpuMemoryFails": Case(
        gpu("UNCORRECTABLE_REMAPPED_ROWS", "3x40 4x50"),
        "The GPU 0 of n1 had a memory error that ECC could not correct.",
        {**gpu("UNCORRECTABLE_REMAPPED_ROWS", "3x90"), **gpu("ROW_REMAP_FAILURE", "0x90")},
        labels=GPU,
    ),
    "ServeAppGpuIsHot": Case(
        gpu("GPU_TEMP", "86x90"),
        "The GPU 0 of n1 has 86 degrees Celsius, and has been above 85 for 10 minutes.",
        gpu("GPU_TEMP", "86x55 84 86x40"),
        labels=GPU,
    ),
}
