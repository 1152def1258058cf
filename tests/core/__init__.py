"""These tests check the core. A failing assertion in one of the modules below shows its values, as one in a test does."""

import pytest

pytest.register_assert_rewrite("tests.core.checked_fleet", "tests.core.expected_fleet", "tests.core.helpers")
