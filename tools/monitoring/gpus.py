"""The health of the GPUs, as NVIDIA's DCGM exporter tells it with its default fields. Without that exporter the row is empty.

Where Prometheus does not honour the exporter's labels, as by default, they begin with ``exported_``, and ``pod`` is the exporter's own.
The series know nothing of releases but the names of their pods, which another release's may begin with. So the pods are those that the
release's own PodMonitor scrapes.
"""

from tools.monitoring.panels import Panel, Row

_NAME = "{{Hostname}} GPU {{gpu}}"


def _of_the_release(series: str) -> str:
    for label in ("namespace", "pod"):
        series = f'label_replace({series}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f'max by (Hostname, gpu) ({series} and on (namespace, pod) up{{job=~"$namespace/$release-ray"}})'


def _panel(title: str, series: str, unit: str, text: str, divisor: str = "") -> Panel:
    return Panel(title, {_NAME: _of_the_release(series) + divisor}, unit, text, quiet=True)


GPUS = Row(
    "Is a GPU ill? (needs NVIDIA's DCGM exporter)",
    (
        _panel(
            "Last XID error",
            "DCGM_FI_DEV_XID_ERRORS",
            "short",
            "0 is none. 48, 63, 64 and 94 are errors of its memory, 79 is a GPU that fell off the bus: replace the node.",
        ),
        _panel(
            "Busy", "DCGM_FI_DEV_GPU_UTIL", "percentunit", "Share of the time with some kernel at work; not how well.", " / 100"
        ),
        _panel("Memory in use", "DCGM_FI_DEV_FB_USED", "bytes", "Weights, KV cache and what vLLM reserves.", " * 1048576"),
        _panel(
            "Temperature",
            "DCGM_FI_DEV_GPU_TEMP",
            "celsius",
            "A GPU that is too hot lowers its clock, and each token takes longer.",
        ),
        _panel("Power", "DCGM_FI_DEV_POWER_USAGE", "watt", "Far below the others under the same load: a GPU that is throttled."),
    ),
)
