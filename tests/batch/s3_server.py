"""This module starts a server that speaks S3 by HTTP, for tests: moto's, with one bucket.

It runs in a process of its own: Flask leaves objects in its modules that fail when vLLM looks through all modules of a process.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import boto3
import pytest

from tests.e2e.fleet import wait_until

BUCKET = "batches"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key-of-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
}


def is_open(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """Return the URL of a prefix in the bucket; the credentials are in the environment."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)], stderr=subprocess.DEVNULL)
    wait_until(lambda: is_open(host, port), limit_s=120, what="moto's server")
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    yield f"s3://{BUCKET}/files?scheme=http&endpoint_override={host}:{port}&region=us-east-1"
    server.terminate()
    server.wait()
    os.environ.clear()
    os.environ.update(before)
