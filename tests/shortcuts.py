"""Tests run with the ingress's shortcuts, or without them where SERVE_APP_TEST_SHORTCUTS is `off`, as `make test-all` does."""

import os

import pytest

WITH_SHORTCUTS = os.environ.get("SERVE_APP_TEST_SHORTCUTS") != "off"
of_shortcuts = pytest.mark.skipif(not WITH_SHORTCUTS, reason="is about a shortcut, and they are off")
