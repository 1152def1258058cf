"""A server that speaks S3 by HTTP, for tests: moto's, with one bucket."""

import os
from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "batches"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "key-of-tests",
    "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """Return the URL of a prefix in the bucket; the credentials are in the environment."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    yield f"s3://{BUCKET}/files?scheme=http&endpoint_override={host}:{port}&region=us-east-1"
    server.stop()
    os.environ.clear()
    os.environ.update(before)
