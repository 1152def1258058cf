"""`helm uninstall` runs this first, with GCS fault tolerance: it deletes the RayService and waits until KubeRay has cleaned Redis.

KubeRay cleans it by a job when a Ray cluster is deleted, which needs Redis, its Secret and the head's account. Helm would delete
those at the same moment. Speaks to the API server with the standard library and the pod's token.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

POLL_S = 2.0
TIMEOUT_S = 10.0
WAITING = (
    "RayService {service} is deleted. Waiting up to {timeout_s} s until the streams in {clusters} have ended and its state is out of "
    "Redis. If helm's --timeout ends first, the rest of the release stays: run helm uninstall again, with --timeout 5m, helm's default, "
    "or more."
)


class Api:
    """KubeRay's resources of one namespace."""

    def __init__(self, url: str, account: Path) -> None:
        self._account = account
        self._base = f"{url}/apis/ray.io/v1/namespaces/{(account / 'namespace').read_text().strip()}"
        self._tls = ssl.create_default_context(cafile=account / "ca.crt") if url.startswith("https:") else None

    def is_helms(self, service: str) -> bool:
        """Tell whether Helm installed the RayService. Where hooks are applied as plain objects, nothing is being uninstalled."""
        annotations = self._call("GET", f"rayservices/{service}")["metadata"].get("annotations", {})
        return "meta.helm.sh/release-name" in annotations

    def delete_service(self, name: str) -> None:
        self._call("DELETE", f"rayservices/{name}")

    def clusters_of(self, service: str) -> list[str]:
        """Return the names of the RayClusters that the RayService made."""
        label = urllib.parse.quote(f"ray.io/originated-from-cr-name={service}")
        return [item["metadata"]["name"] for item in self._call("GET", f"rayclusters?labelSelector={label}")["items"]]

    def _call(self, method: str, path: str) -> Any:
        token = (self._account / "token").read_text().strip()  # read again: the kubelet renews it
        request = urllib.request.Request(f"{self._base}/{path}", method=method, headers={"authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
            return json.load(answer)


def main(arguments: list[str]) -> int:
    service, timeout_s, url, account = arguments
    api = Api(url, Path(account))
    deadline = time.monotonic() + float(timeout_s)
    try:
        if not api.is_helms(service):
            print(
                f"RayService {service} was not installed by helm: left alone; apply charts without their hooks", file=sys.stderr
            )
            return 0
        api.delete_service(service)
    except urllib.error.HTTPError as exc:
        if exc.code != 404:  # gone already
            raise
    is_told = False
    while left := api.clusters_of(service):
        if not is_told:
            print(WAITING.format(service=service, clusters=", ".join(left), timeout_s=timeout_s), flush=True)
            is_told = True
        if time.monotonic() > deadline:
            # Not a failure: the release could not be uninstalled then. KubeRay gives up too, five minutes after it has made its
            # cleaning job; before that it waits for the head's pod to end, however long that takes.
            print(f"{', '.join(left)} still there after {timeout_s} s; what they left in Redis stays", file=sys.stderr)
            return 0
        time.sleep(POLL_S)
    print(f"the Ray clusters of {service} are gone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
