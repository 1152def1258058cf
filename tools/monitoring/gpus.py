"""These panels show the GPUs' health, as NVIDIA's DCGM exporter reports it by its default fields. Without the exporter they are empty.

If Prometheus does not honour the exporter's labels, as by default, they begin with ``exported_``, and ``pod`` is the exporter's own. The
series name pods, not releases, and another release's name may begin with this release's name. So the panels select the pods that the
release's own PodMonitor scrapes.
"""

from tools.monitoring.panels import Panel, Row
from tools.monitoring.rule import Alert

_NAME = "{{Hostname}} GPU {{gpu}}"


_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
"""XIDs that a program causes, and not the GPU: NVIDIA's device plugin leaves the GPU in service."""
_HOT_CELSIUS = 85


def _with_pod(series: str) -> str:
    for label in ("namespace", "pod"):
        series = f'label_replace({series}, "{label}", "$1", "exported_{label}", "(.+)")'
    return series


def _of_the_release(series: str) -> str:
    return f'max by (Hostname, gpu) ({_with_pod(series)} and on (namespace, pod) up{{job=~"$namespace/$release-ray"}})'


def _alert(name: str, wait: str, series: str, summary: str) -> Alert:
    # Adding zero joins the GPU's series with the job of the release's pods. A pod has one `up` for each port.
    up = 'max by (job, namespace, pod) (0 * up{job="${namespace}/${release}-ray"})'
    expr = f"max by (job, Hostname, gpu) ({_with_pod(series)} + on (namespace, pod) group_left (job) {up})"
    return Alert(
        name, "warning", wait, expr, f"The GPU {{{{ $labels.gpu }}}} of {{{{ $labels.Hostname }}}} {summary}", model=False
    )


GPU_ALERTS = (
    _alert(
        "ServeAppGpuFails",
        "0m",
        "(DCGM_FI_DEV_XID_ERRORS > 0" + "".join(f" != {xid}" for xid in _OF_PROGRAMS) + ")",
        "reported the error XID {{ $value }} to its driver, which a program does not cause.",
    ),
    _alert(
        "ServeAppGpuMemoryFails",
        "0m",
        "(increase(DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS[1h]) > 0 or DCGM_FI_DEV_ROW_REMAP_FAILURE > 0)",
        "had a memory error that ECC could not correct.",
    ),
    _alert(
        "ServeAppGpuIsHot",
        "10m",
        f"(DCGM_FI_DEV_GPU_TEMP > {_HOT_CELSIUS})",
        f"has {{{{ $value }}}} degrees Celsius, and has been above {_HOT_CELSIUS} for 10 minutes.",
    ),
)


def _panel(title: str, series: str, unit: str, text: str, divisor: str = "") -> Panel:
    return Panel(title, {_NAME: _of_the_release(series) + divisor}, unit, text, quiet=True)


GPUS = Row(
    "Does a GPU fail? (needs NVIDIA's DCGM exporter)",
    (
        _panel(
            "Last XID error",
            "DCGM_FI_DEV_XID_ERRORS",
            "short",
            "0: no error. 48, 63, 64 and 94 are memory errors, and 79 is a GPU that fell off the bus: replace the node.",
        ),
        _panel(
            "Busy",
            "DCGM_FI_DEV_GPU_UTIL",
            "percentunit",
            "Share of the time with some kernel at work; it does not show how well.",
            " / 100",
        ),
        _panel("Memory in use", "DCGM_FI_DEV_FB_USED", "bytes", "Weights, KV cache and vLLM's reserve.", " * 1048576"),
        _panel(
            "Temperature",
            "DCGM_FI_DEV_GPU_TEMP",
            "celsius",
            "A GPU that is too hot lowers its clock, so each token takes longer.",
        ),
        _panel("Power", "DCGM_FI_DEV_POWER_USAGE", "watt", "A GPU far below the others under the same load is throttled."),
    ),
)
