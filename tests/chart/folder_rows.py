"""These rows of test_lint.py are about folders: what the ingress writes, and models in a part of a download."""

from typing import Any

from tests.chart.lint_rows import Check, model, weights
from tests.chart.places import HUB
from tests.chart.render import at, merged


def kept_in(folder: str, *mounts: dict[str, Any]) -> dict[str, Any]:
    """Return values of an ingress that keeps its ledger in a folder, and has these mounts of a volume."""
    pods = {"extraVolumes": [{"name": "v", "emptyDir": {}}], "extraVolumeMounts": [{"name": "v", **mount} for mount in mounts]}
    return merged(at("config.ingress.ledger.dir", folder), at("ingressPods", pods))


FOLDERS: list[Check] = [
    (
        "a folder of batches on the read-only root",
        at("config.ingress.batch.dir", "/var/lib/serve-app/batches"),
        ("config.ingress.batch.dir is /var/lib/serve-app/batches", "ingressPods.extraVolumeMounts", "read-only"),
        at("config.ingress.batch.dir", "/tmp/batches"),
    ),
    (
        "a folder of batches for several ingresses",
        merged(at("config.ingress.batch.dir", "/b"), at("config.ingress.replicas.max", 2)),
        ("config.ingress.batch.dir is /b", "config.ingress.replicas.max is 2", "set batches.databaseSecret"),
        merged(
            at("config.ingress.batch.files", "s3://b/p"), at("config.ingress.replicas.max", 2), at("batches.databaseSecret", "s")
        ),
    ),
    (
        "a ledger beside the volume that is mounted",
        kept_in("/data-2/ledger", {"mountPath": "/data"}),
        ("config.ingress.ledger.dir is /data-2/ledger", "mounts nothing there that it may write to"),
        kept_in("/data/ledger", {"mountPath": "/data/"}),
    ),
    (
        "a ledger on a volume that is mounted read-only",
        kept_in("/data/ledger", {"mountPath": "/data", "readOnly": True}),
        ("config.ingress.ledger.dir is /data/ledger",),
        kept_in("/data", {"mountPath": "/data", "readOnly": False}),
    ),
    (
        "a ledger in a read-only part of a volume",
        kept_in("/data/a/ledger", {"mountPath": "/data"}, {"mountPath": "/data/a", "readOnly": True}),
        ("config.ingress.ledger.dir is /data/a/ledger",),
        kept_in("/data/a/ledger", {"mountPath": "/data", "readOnly": True}, {"mountPath": "/data/a"}),
    ),
    (
        "a model in a folder whose name begins like a download's",
        merged(model("/models/m2/part"), weights(HUB)),
        ("/models/m2/part, but weights.downloads fetches /models/m", "path m2/part or of a folder above it"),
        merged(model("/models/m/part"), weights(HUB)),
    ),
]
