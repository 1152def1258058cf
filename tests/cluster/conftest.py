"""This module provides the release that all tests of this folder share, and skips them without a cluster."""

import os

import pytest

from tests.cluster.release import Release, images_from_environment


@pytest.fixture(scope="session")
def release() -> Release:
    """The installed release, ready."""
    images = images_from_environment()
    if not os.environ.get("KUBECONFIG") or images is None:
        pytest.skip("no cluster: `make test-cluster` sets KUBECONFIG and the images")
    installed = Release(images)
    installed.install()
    return installed
