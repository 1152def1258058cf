"""This script makes helm/serve-app/values.schema.json and files/rules.yaml from values.yaml and serve-app's configuration.

Types come from the default values, descriptions from the `# --` comments, and everything else (an empty list's entries, bounds, choices)
from the tables below. Every object is closed and requires all its keys. So a misspelt key fails, and so does a null, with which Helm would
drop a default, and a template would read "off". `config` has the configuration's own schema. rules.yaml holds the tables of ports,
timeouts, names of other systems and of vLLM's arguments, wrong forms of weights' places and the form of tenants' names that both `serve-app
check` and the chart's templates check. The schema lets such names through, because its own error could not say which name is meant.
Run as `python -m tools.chart_schema`; tests/chart/test_generated.py fails if a file is outdated.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from serve_app.config import settings_json_schema
from serve_app.config.checks import MAX_WRITTEN_REPLICAS, RESERVED_PORTS, ZERO_HINTS
from serve_app.config.foreign import FOREIGN
from serve_app.config.tenants_file import RESERVED_NAMES, TENANT_PATTERN, tenants_json_schema
from serve_app.config.timeouts import FOLLOWING, RULES
from serve_app.config.vllm_arguments import misplaced_arguments
from serve_app.config.weight_places import FOLDER_FORMS, MODEL_FORMS
from tools.chart_forms import FREE_MAPS, NETWORK, SECRETS, forms_of, let_zero_through, loosened
from tools.chart_sections import open_to_foreign_names, places

CHART = Path(__file__).parents[1] / "helm" / "serve-app"
Schema = dict[str, Any]

_STRING_MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_QUANTITY: Schema = {"type": ["string", "number"], "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$", "minimum": 0}
_CPUS: Schema = {**_QUANTITY, "pattern": r"^[0-9]+(\.[0-9]+)?m?$"}
_BYTES: Schema = {**_QUANTITY, "pattern": r"^[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti)?$"}
_BYTES_OR_EMPTY: Schema = {**_BYTES, "pattern": rf"^$|{_BYTES['pattern']}"}
_AMOUNTS: Schema = {"type": "object", "properties": {"cpu": _CPUS, "memory": _BYTES}, "additionalProperties": _QUANTITY}
_LABELS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": 63, "pattern": "^(([A-Za-z0-9][A-Za-z0-9_.-]*)?[A-Za-z0-9])?$"},
}
_NAME_OR_EMPTY: Schema = {"type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"}
_REPOSITORY = r"[a-z0-9._-]+(:[0-9]+)?(/[a-z0-9._-]+)*"
_OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
_STRINGS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_CIDRS: Schema = {"type": "array", "items": {"type": "string", "pattern": NETWORK}}
_IP_BLOCK: Schema = {"type": "object", "properties": {"cidr": {"type": "string", "minLength": 1}}}  # cidr-wrong judges it
_PEERS: Schema = {"type": "array", "items": {"type": "object", "properties": {"ipBlock": _IP_BLOCK}}}
_SOME_CIDRS: Schema = {**_CIDRS, "minItems": 1}
_NAMESPACE: Schema = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"}
_ADDRESS: Schema = {"type": "string", "pattern": r"^(https?://[^/]+.*)?$"}
_ORDER: Schema = {
    "type": "integer",
    "minimum": 0,
    "maximum": 999999,
    "default": 0,
    "description": "Place of the model's worker group among the others. A canary's default is 999999: behind all models.",
}
_SERVED: Schema = {
    "type": "boolean",
    "default": True,
    "description": "Whether the model is served. If not, only its worker group is left, without pods.",
}
_PODS_OF: Schema = {
    "type": "string",
    "minLength": 1,
    "description": "The model in whose pods this one runs. Both have sleep.replicas_per_gpu above 1.",
}
# Below 0.94 the error budget is so large that even a complete outage does not burn it 14.4 times too fast.
_OBJECTIVE: Schema = {"type": "number", "minimum": 0.94, "exclusiveMaximum": 1}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def _closed(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _named(*keys: str) -> Schema:
    """Return the schema of a list of Kubernetes' objects that have these keys."""
    keyed: Schema = {key: {"type": "string", "minLength": 1} for key in keys}
    return {
        "type": "array",
        "items": {"type": "object", "properties": keyed | {"value": {"type": "string"}}, "required": list(keys)},
    }


_NEVER_IGNORED = {
    *("release-name", "set-by-chart", "foreign-key", "port-taken", "min-above-max", "config-too-large", "name-twice"),
    *("nodes-cannot-be", "stages-cannot-be", "pods-cannot-be-shared", "label-of-chart", "annotation-of-helm", "nothing-served"),
    *("request-above-limit", "value-moved", "weights-path-twice", "weights-revision-moves", "weights-place-wrong"),
    *("mount-without-volume", "not-a-mapping", "host-is-no-name", "certificate-without-arn", "redis-address-wrong"),
    *("wrong-form", "account-without-name", "download-cannot-be", "max-is-zero", "cidr-wrong"),
    *("alb-check-not-a-number", "redis-secret-of-chart", "serve-outlasts-drain"),
    *("tenant-name", "tenant-model-not-served", "tenant-key-twice", "tenant-day", "oidc-without-tenants"),
}
"""Rules that cannot be ignored: Kubernetes, Helm or serve-app itself would refuse the release, or the chart could not make it."""


_OF_PODS = "each kind of pod has its own: set it under head, ingressPods or modelPods"
_FOREIGN_VALUES = {
    **dict.fromkeys(
        ("resources", "nodeSelector", "tolerations", "affinity", "podAnnotations", "podLabels", "env", "extraEnv"), _OF_PODS
    ),
    **dict.fromkeys(
        ("replicas", "replicaCount"), "set config.models.NAME.replicas: {min: 1, max: 2}, or config.ingress.replicas"
    ),
    **dict.fromkeys(
        ("models", "protocol", "health", "logs", "tracing", "membership"), "it is a key of serve-app's: put it under config"
    ),
    **dict.fromkeys(("model", "modelName"), "set config.models.NAME.model to the weights; NAME is what requests ask for"),
    "autoscaling": "set config.models.NAME.replicas: {min: 1, max: 2}; config.autoscaling caps the GPUs of all models",
    "serviceAccount": "set serviceAccounts",
    "imagePullSecrets": "set image.pullSecrets",
    "hfToken": "set weights.huggingFaceTokenSecret to the name of a Secret",
    "persistence": "weights has the volume of models",
    "ingress.certificateArn": "set ingress.albCertificateArn",
    "ingress.scheme": "set ingress.albScheme",
    "ingress.host": "set ingress.hosts, a list",
    "monitoring.release": "set monitoring.labels: {release: NAME}",
}
"""Values of other charts, by their paths -> the chart's own, or one sentence."""


def _moved_values() -> Iterator[tuple[str, str]]:
    """Yield path and new path of the values that have moved (UPGRADE.md)."""
    for job in ("weights", "test", "check", "ui"):
        for key in ("nodeSelector", "tolerations", "podLabels"):
            yield f"{job}.{key}", f"jobs.{key}"
    yield "uninstall", "jobs"
    for image in ("cudaImage", "gcsFaultTolerance.redis.image", "weights.s3Image"):
        for key in ("pullPolicy", "pullSecrets"):
            yield f"{image}.{key}", f"image.{key}"
    extra = {"extraEnvFrom": "envFrom", "extraContainers": "containers", "extraInitContainers": "initContainers"}
    for pods in ("head", "ingressPods", "modelPods"):
        for old, new in {**extra, "schedulerName": "schedulerName"}.items():
            yield f"{pods}.{old}", f"{pods}.extra.{new}"
        if pods != "head":
            yield f"{pods}.topologySpreadConstraints", f"{pods}.extra.topologySpreadConstraints"
    for key in _TIMEOUTS:
        yield f"timeouts.{key}", f"timeouts.overrides.{key}"
    yield "gcsFaultTolerance.redis.priorityClassName", "head.priorityClassName"
    for pods in ("head", "worker"):
        yield f"priorityClasses.{pods}Value", f"priorityClasses.values.{pods}"


def rule_names() -> set[str]:
    """Return the names of all rules: those of the chart's own tables, and those of the timeouts."""
    files = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted((CHART / "files" / "lints").glob("*.yaml"))]
    own = {rule["rule"] for tables in files for table in tables.values() for rule in table if "rule" in rule}
    return own | {rule.name for rule in RULES}


_SPREAD: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["maxSkew", "topologyKey", "whenUnsatisfiable"],
        "properties": {
            "maxSkew": {"type": "integer", "minimum": 1},
            "topologyKey": {"type": "string", "minLength": 1},
            "whenUnsatisfiable": {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
        },
    },
}

_DOWNLOAD: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["path", "source"],
    "properties": {key: {"type": "string"} for key in ("path", "source", "revision", "sha256")},  # rules judge them
}

_TIMEOUTS = ("rayDrainSeconds", "gcsReconnectSeconds", "terminationGracePeriodSeconds", "rayClusterDeletionDelaySeconds")
_CONTAINERS = _named("name")
_EXTRA = {"containers": _CONTAINERS, "initContainers": _CONTAINERS, "envFrom": _OBJECTS, "schedulerName": {"type": "string"}}

BY_KEY: dict[str, Schema] = {
    **dict.fromkeys(("annotations", "podAnnotations", "commonAnnotations"), _STRING_MAP),
    **dict.fromkeys(("nodeSelector", "podLabels", "labels", "dashboardLabels", "commonLabels"), _LABELS),
    **dict.fromkeys(("tolerations", "parentRefs", "extraEgress"), _OBJECTS),
    "clients": _PEERS,
    **dict.fromkeys((*SECRETS, "existingClaim"), _NAME_OR_EMPTY),
    "existingSecretKey": {"type": "string", "minLength": 1},
    **dict.fromkeys(("extraEnv", "extraVolumes"), _named("name")),
    "head.extra": _closed(**_EXTRA),
    **dict.fromkeys(("ingressPods.extra", "modelPods.extra"), _closed(**_EXTRA, topologySpreadConstraints=_SPREAD)),
    "timeouts.overrides": _closed(**{key: {"type": "integer", "minimum": 0} for key in _TIMEOUTS}),
    "ignoredRules": {"type": "array", "items": {"enum": sorted(rule_names() - _NEVER_IGNORED)}},
    "tls": _OBJECTS,
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "weightsPorts": {"type": "array", "items": _PORT},
    "podSecurityContext": {"type": "object"},
    "extraVolumeMounts": _named("name", "mountPath"),
    **dict.fromkeys(("pullSecrets", "hosts", "hostnames"), _STRINGS),
    "loadBalancerSourceRanges": _CIDRS,
    # In a policy, an empty list means all peers, not none.
    **dict.fromkeys(("apiServerCidrs", "weightsCidrs", "redisCidrs"), _SOME_CIDRS),
    "dns": {**_PEERS, "minItems": 1},
    **dict.fromkeys(("operatorNamespace", "prometheusNamespace"), _NAMESPACE),
    **dict.fromkeys(("huggingFaceEndpoint", "s3Endpoint", "grafanaUrl"), _ADDRESS),
    **dict.fromkeys(("tmpSize", "homeSize", "shmSize", "size"), _BYTES),
    **dict.fromkeys(("requests", "limits"), _AMOUNTS),
    "affinity": {"type": "object"},
    "inline": {"type": "object"},
    "apiServerPorts": {"type": "array", "items": _PORT, "minItems": 1},
    "downloads": {"type": "array", "items": _DOWNLOAD},
    "digest": {"type": "string", "pattern": r"^(sha256:[0-9a-f]{64})?$"},
    "imagePullSecrets": {"type": ["array", "null"], "items": {"type": ["string", "object"]}},
    "imageRegistry": {"type": ["string", "null"], "pattern": f"^({_REPOSITORY}/?)?$"},
    **dict.fromkeys((f"serviceAccounts.{account}.name" for account in ("head", "worker", "weights")), _NAME_OR_EMPTY),
    "check.timeoutSeconds": {"type": "integer", "minimum": 1},
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "nodesWithin": {"type": "string", "pattern": r"^(([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?)?$"},
    "topologySpread": {"enum": ["ScheduleAnyway", "DoNotSchedule", ""]},
    "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "albScheme": {"enum": ["internal", "internet-facing"]},
    "accessMode": {"enum": ["ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce"]},
    "whenDeleted": {"enum": ["Delete", "Retain"]},
    "port": _PORT,
    "prefillSeconds": {"type": "integer", "minimum": 30},
    "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
    "upgradeStrategy": {"enum": ["NewCluster", "None"]},
    "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
    # The pattern accepts a tag or a digest at the end, which the chart itself refuses with the way out.
    "repository": {"type": "string", "pattern": f"^{_REPOSITORY}([:@][A-Za-z0-9._:-]+)?$"},
    "cudaImage.repository": {"type": "string", "pattern": f"^({_REPOSITORY}([:@][A-Za-z0-9._:-]+)?)?$"},
    "tag": {"type": "string", "pattern": "^[A-Za-z0-9._-]*$"},
    "monitoring.slo.availability": _OBJECTIVE,
    "monitoring.slo.ttft.objective": _OBJECTIVE,
    "monitoring.slo.itl.objective": _OBJECTIVE,
    "monitoring.slo.ttft.seconds": {"enum": [0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]},
    "monitoring.slo.itl.seconds": {"enum": [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5]},
    "modelPods.image": {"enum": ["auto", "cpu", "cuda"]},
    "modelPods.resources": _closed(requests=_AMOUNTS, limits=_AMOUNTS),
    **dict.fromkeys(
        ("ingressPods.tmpSize", "modelPods.asleepSize", "modelPods.checkpointSize", "modelPods.homeSize", "modelPods.shmSize"),
        _BYTES_OR_EMPTY,
    ),
}
"""Schemas by the name of a key, at any place. A name with dots is the path of one place, whose schema wins over that of the key's name."""


def values_schema() -> Schema:
    """Return the whole schema."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    described = dict(descriptions())
    config = _moved(settings_json_schema())
    del config["properties"]["ui"], config["$defs"]["UiSettings"]  # only for `serve-app up`; the chart's own value is `ui`
    del values["config"]
    old = dict(_moved_values())
    by_key = {path: loosened(path.rpartition(".")[2], schema) for path, schema in BY_KEY.items()}
    properties = {key: schema_of(value, (key,), described, by_key) for key, value in values.items()}
    tenants = tenants_json_schema()
    config["$defs"] |= tenants.pop("$defs")
    inline = tenants["properties"]["tenants"]
    properties["tenants"]["properties"]["inline"] |= {
        key: value for key, value in inline.items() if key not in ("description", "minProperties", "propertyNames")
    }
    for path in (*old, *_FOREIGN_VALUES):
        if "." in path:
            _let_through(path, properties)
    pods = properties["modelPods"]["properties"]
    own = {key: _partial_of(f"#/properties/modelPods/properties/{key}", schema) for key, schema in pods.items()}
    described_pods = {"type": "object", "description": "Keys of modelPods that differ for this model.", "properties": own}
    closed = {"additionalProperties": False, "patternProperties": properties["modelPods"]["patternProperties"]}
    of_models = {"order": _ORDER, "pods": {**described_pods, **closed}, "podsOf": _PODS_OF, "served": _SERVED}
    config["$defs"]["ModelSettings"]["properties"] |= of_models
    let_zero_through(config["$defs"])
    del config["$defs"]["ModelSettings"]["if"], config["$defs"]["ModelSettings"]["then"]  # the rule required-from-zero says why
    foreign = dict(open_to_foreign_names(config))
    for name in ("ModelSettings", "IngressSettings"):
        replicas = config["$defs"][name]["properties"]["replicas"]
        # Rules of the chart say what to write in place of a number, and below in place of an adapter's path alone.
        replicas |= {"if": {"type": "number"}, "else": {"$ref": replicas.pop("$ref")}}
    adapters = config["$defs"]["ModelSettings"]["properties"]["adapters"]
    adapters["additionalProperties"] = {"if": {"type": "string"}, "else": adapters["additionalProperties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the chart serve-app",
        "type": "object",
        "additionalProperties": False,
        "required": ["config", *properties],
        "patternProperties": _patterns(path for path in (*_FOREIGN_VALUES, *old) if "." not in path),
        "properties": {
            **properties,
            "enabled": {"type": "boolean", "description": "Read by a parent chart alone, as the `condition` of this one."},
            "global": {**properties["global"], "additionalProperties": True},  # a parent chart may add its own keys
            "config": config,
        },
        "$defs": config.pop("$defs") | foreign,
    }


def _let_through(path: str, properties: dict[str, Any]) -> None:
    """Let the schema pass a value that has moved or is foreign: a rule refuses it by a sentence with its place."""
    *parents, key = path.split(".")
    section: Schema = {"properties": properties}
    for parent in parents:
        section = section["properties"][parent]
    section["patternProperties"] = section.get("patternProperties", {}) | _patterns([key])


def chart_rules() -> dict[str, Any]:
    """Return the content of files/rules.yaml."""
    ports = [{"first": ports[0], "last": ports[-1], "owner": owner} for ports, owner in RESERVED_PORTS.items()]
    timeouts = [
        {key: value for key, value in rule._asdict().items() if value != ""}  # most have no way_out of their own
        | {"shorter": list(rule.shorter), "follows": rule.longer in FOLLOWING}
        for rule in RULES
    ]
    by_meaning: dict[str, list[str]] = {}
    for name, meant in misplaced_arguments().items():
        by_meaning.setdefault(meant, []).append(name)
    return {
        "ports": ports,
        "timeouts": timeouts,
        "foreign": dict(FOREIGN),
        "arguments": [{"meant": meant, "names": names} for meant, names in by_meaning.items()],
        "sections": [{"place": place.path, "own": place.own(), "takesArguments": place.takes_arguments} for place in places()],
        "maxWrittenReplicas": MAX_WRITTEN_REPLICAS,
        "modelForms": [form._asdict() for form in MODEL_FORMS],
        "folderForms": [form._asdict() for form in FOLDER_FORMS],
        "foreignValues": _FOREIGN_VALUES,
        "moved": dict(_moved_values()),
        "forms": forms_of(BY_KEY),
        "network": NETWORK,
        "freeMaps": list(FREE_MAPS),
        "zeros": ZERO_HINTS,
        "tenantNames": {"pattern": TENANT_PATTERN, "reserved": list(RESERVED_NAMES)},
    }


def _patterns(names: Iterable[str]) -> Schema:
    return {f"^({'|'.join(sorted(names))})$": True}


def schema_of(
    value: Any, path: tuple[str, ...], described: Mapping[tuple[str, ...], str], by_key: Mapping[str, Schema] = BY_KEY
) -> Schema:
    """Return the schema of a default value."""
    schema: Schema
    if known := by_key.get(".".join(path)) or by_key.get(path[-1]):
        schema = dict(known)
    elif isinstance(value, dict):
        properties = {key: schema_of(entry, (*path, key), described, by_key) for key, entry in value.items()}
        schema = {"type": "object", "additionalProperties": False, "properties": properties, "required": list(properties)}
    elif isinstance(value, bool):
        schema = {"type": "boolean"}
    elif isinstance(value, int):
        schema = {"type": "integer", "minimum": 0}
    elif isinstance(value, str):
        schema = {"type": "string"}
    else:
        raise TypeError(f"values.yaml: {'.'.join(path)} is {value!r}; name its type in BY_KEY of {__name__}")
    return schema | ({"description": described[path]} if path in described else {})


def _partial(schema: Schema) -> Schema:
    """Return the schema of an object without required keys, because defaults lie beneath it."""
    parts = {key: _partial(part) for key, part in schema.get("properties", {}).items()}
    return {key: value for key, value in schema.items() if key != "required"} | ({"properties": parts} if parts else {})


def _partial_of(pointer: str, schema: Schema) -> Schema:
    """Return `_partial` of the schema at ``pointer``: a reference, if both are the same."""
    part = _partial(schema)
    return {"$ref": pointer} if part == schema else part


def _moved(schema: Schema) -> Schema:
    """Return the configuration's schema for use below `config`: the chart adds missing keys, so none is required."""
    del schema["properties"]["models"]["minProperties"]
    return {key: value for key, value in schema.items() if key not in ("$schema", "required")}


def descriptions(chart: Path = CHART) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each key of values.yaml that has a `# --` comment, and its text."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (chart / "values.yaml").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\s*# ?(.*)", line):
            text = found[1]
            if text.startswith("-- "):
                comment = [text.removeprefix("-- ")]
            elif comment and not text.startswith("@"):
                comment.append(text)
        elif found := re.match(r"( *)([A-Za-z_0-9]+):", line):
            indent = len(found[1])
            path = [*((i, key) for i, key in path if i < indent), (indent, found[2])]
            if comment:
                yield tuple(key for _, key in path), " ".join(comment)
            comment = []


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(json.dumps(values_schema(), indent=2) + "\n", encoding="utf-8")
    made = "# Made by `make chart-files` from tools/chart_schema.py and the tables of serve_app/config/.\n"
    (CHART / "files" / "rules.yaml").write_text(
        made + yaml.safe_dump(chart_rules(), sort_keys=False, width=1000), encoding="utf-8"
    )
