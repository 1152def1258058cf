"""This script makes docs/openapi.json, the OpenAPI description of an ingress's answers: `python -m tools.openapi`, 20 s.

vLLM's own applications describe its routes: one application of a model that makes text, and one of a model that makes vectors. Routes of
vLLM that an ingress does not serve are left out. The ingress's own routes are described here.
"""

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from serve_app.engine_args import INGRESS_ENVIRONMENT

os.environ.update(INGRESS_ENVIRONMENT)  # before vLLM is imported, which would look for a GPU

from serve_app.checkpoints import KINDS
from serve_app.config import parse_settings
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.front_end.front_end import build_front_end
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.routes.app import VLLM_ROUTES, WITHOUT_KEY
from serve_app.ingress.routes.generate_body import GenerateRequest
from serve_app.links.protocol.messages import Capabilities

PAGE = Path(__file__).parents[1] / "docs" / "openapi.json"
APPLICATIONS: Mapping[str, tuple[Mapping[str, Any], tuple[str, ...]]] = {
    "llama": ({}, ("generate",)),
    "embedding": ({"runner": "pooling"}, ("embed", "classify")),
}
"""Kind of a tiny model -> vLLM's arguments for it, and the tasks that its replicas are taken to report."""
OWN: Mapping[str, tuple[str, str]] = {
    "/v1/models": ("get", "The models and adapters that are served."),
    "/v1/models/{name}": ("get", "One model or adapter."),
    "/generate": ("post", "Text, sampled or by beam search. Other fields are those of vLLM's SamplingParams."),
    "/fleet": ("get", "Ingresses and replicas with loads, targets, starts and losses, and the autoscaler's last decisions."),
    "/fleet/requests": (
        "get",
        "The ways of the newest requests of this ingress: replicas in order, and why. With keys, of the tenant.",
    ),
    "/version": ("get", "Versions of serve-app and vLLM."),
    "/healthz": ("get", "The process is alive."),
    "/health": ("get", "The same, in vLLM's form."),
    "/readyz": ("get", "Requests can be answered; a 503 says why not."),
    "/metrics": ("get", "Prometheus' text format."),
}
_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')
_SCHEMAS = "#/components/schemas/{model}"


def description(applications: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description, made from those of vLLM's applications, with the schemas that it uses."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for described in applications.values():
        paths |= {path: {"post": methods["post"]} for path, methods in described["paths"].items() if path in VLLM_ROUTES}
        schemas |= described["components"]["schemas"]
    body = GenerateRequest.model_json_schema(ref_template=_SCHEMAS) | {"additionalProperties": True}
    schemas["GenerateRequest"] = body
    paths |= {path: {method: _own(path, summary)} for path, (method, summary) in OWN.items()}
    for path in paths.keys() & WITHOUT_KEY:
        next(iter(paths[path].values()))["security"] = []
    used = dict(_used(json.dumps(paths), schemas))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "serve-app",
            "version": metadata.version("serve-app"),
            "description": "docs/api.md says which routes are there when.",
        },
        "servers": [{"url": "http://127.0.0.1:8010"}],
        "security": [{"key": []}],
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(used.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _own(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": "The answer."}}}
    if path == "/generate":
        schema = {"$ref": _SCHEMAS.format(model="GenerateRequest")}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _used(text: str, schemas: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas to which ``text`` refers, directly or through other schemas."""
    known: set[str] = set()
    left = set(_REFERENCE.findall(text))
    while left:
        known |= left
        found = {name: schemas[name] for name in left}
        yield from found.items()
        left = set(_REFERENCE.findall(json.dumps(found))) - known


async def _applications() -> dict[str, dict[str, Any]]:
    described = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, (args, tasks) in APPLICATIONS.items():
            checkpoint = str(KINDS[kind](Path(folder) / kind))
            settings = parse_settings({"models": {kind: {"model": checkpoint, "engine_args": dict(args)}}})
            model = settings.models[kind]
            client = FleetClient(settings, model, ingress_id="openapi", token=b"", tls=None)
            client.links.capabilities = Capabilities(2048, 16, 0, tasks, "")
            described[kind] = (await (await build_front_end(model, checkpoint, client, GrammarCompiler())).app()).openapi()
    return described


def page() -> str:
    """Return docs/openapi.json."""
    return json.dumps(description(asyncio.run(_applications())), separators=(",", ":"), sort_keys=True) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
