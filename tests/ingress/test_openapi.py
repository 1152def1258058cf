"""docs/openapi.json lists the routes of the ingress's own table."""

import json
import subprocess
import sys

import pytest

from serve_app.ingress.routes.app import VLLM_ROUTES
from serve_app.ingress.routes.own_answers import MODELS, REQUESTS, OwnAnswers
from tools.openapi import OWN, PAGE


def test_the_description_has_the_routes_that_an_ingress_answers() -> None:
    async def report() -> dict[str, object]:
        return {}

    own = OwnAnswers({}, version={}, fleet_id="", is_draining=lambda: False, report=report).by_path()
    assert set(OWN) == {*own, "/generate", MODELS, REQUESTS, "/v1/models/{name}"}
    assert set(json.loads(PAGE.read_text())["paths"]) == {*VLLM_ROUTES, *OWN}


@pytest.mark.slow
def test_the_description_is_up_to_date() -> None:
    # In a process of its own: names of vLLM's schemas depend on what else of the `openai` package is imported.
    made = subprocess.run(
        [sys.executable, "-c", "from tools.openapi import page; print(page(), end='')"],
        cwd=PAGE.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.splitlines()[-1] == PAGE.read_text().strip(), "run: python -m tools.openapi"
