"""A Secret holds the URL of the database that ingresses share for batches."""

from typing import Any

import pytest

from tests.chart.places import size_of
from tests.chart.render import at, merged, render

FILES = "s3://bucket/batches?region=eu-central-1"
VALUES = {
    "batches": {"databaseSecret": "batch-database"},
    "config": {"ingress": {"replicas": {"min": 2, "max": 4}, "batch": {"files": FILES, "lease_s": 20}}},
}


def test_ingress_pods_get_the_database_s_url_by_a_file_and_no_other_pod_does() -> None:
    rendered = render(VALUES)
    path = "/etc/serve-app/batch-database"
    assert rendered.config["ingress"]["batch"] == {"database_file": f"{path}/url", "files": FILES, "lease_s": 20}
    pod = rendered.group("ingress")["template"]["spec"]
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["batch-database"] == {"name": "batch-database", "mountPath": path, "readOnly": True}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "batch-database"]
    assert volume["secret"] == {"secretName": "batch-database", "defaultMode": 0o440}
    assert rendered.text.count("secretName: batch-database") == 1


def test_batch_may_be_null_as_documented() -> None:
    assert render(at("config.ingress.batch", None)).config["ingress"]["batch"] is None


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (None, "4Gi"),
        ({"dir": "/tmp/batches"}, "4Gi"),
        ({"files": FILES}, "24Gi"),
        ({"files": FILES, "max_stored_bytes": (1 << 30) + 1, "max_file_bytes": 1 << 20}, "6Gi"),
    ],
    ids=str,
)
def test_tmp_holds_what_ingresses_may_keep_of_the_files_that_they_share(batch: dict[str, Any] | None, size: str) -> None:
    """A pod whose /tmp grows beyond its limit is evicted, and the ingress sees only the node's disk."""
    values = at("config.ingress.batch", batch)
    assert size_of("ingress", "tmp")(render(values)) == size
    assert size_of("ingress", "tmp")(render(merged(values, at("ingressPods.tmpSize", "3Gi")))) == "3Gi"
