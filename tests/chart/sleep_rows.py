"""These rows of test_lint.py are about models that sleep and the pods that they share; test_shared_pods.py renders the same models."""

from typing import Any

from tests.chart.lint_rows import Check
from tests.chart.render import merged, models

PATIENT = {
    "config": {"timeouts": {"no_replica_s": 300}, "ingress": {"keep_alive_s": 610}},
    "timeouts": {"loadBalancerIdleSeconds": 600},
}
SLEEPER = {
    "model": "/opt/m",
    "device": "cuda",
    "gpus_per_replica": 1,
    "required": False,
    "replicas": {"min": 0, "max": 1},
    "sleep": {"replicas_per_gpu": 3},
}
CHAT: dict[str, Any] = {"name": "chat", **SLEEPER, "pods": {"asleepSize": "48Gi"}}
CODE: dict[str, Any] = {"name": "code", **SLEEPER, "podsOf": "chat"}
TALK: dict[str, Any] = {"name": "talk", **SLEEPER, "podsOf": "chat"}


def sleeping(*several: dict[str, Any]) -> dict[str, Any]:
    return merged(models(*several), PATIENT)


def _row(name: str, wrong: tuple[dict[str, Any], ...], *said: str, right: tuple[dict[str, Any], ...] = (CHAT, CODE)) -> Check:
    return name, sleeping(*wrong), said, sleeping(*right)


SIMULATED = {"device": "cpu", "simulated": {"profile": "a10g-llama-8b"}}
LEVEL_2 = {"sleep": {"replicas_per_gpu": 3, "level": 2}}

SLEEP: list[Check] = [
    _row(
        "a model in the pods of none",
        (CHAT, CODE | {"podsOf": "chart"}),
        "config.models.code.podsOf is chart, which is no other of config.models",
    ),
    _row(
        "a model in its own pods",
        (CHAT, CODE, TALK | {"podsOf": "talk"}),
        "config.models.talk.podsOf is talk, which is the model itself",
    ),
    _row(
        "a model in the pods of a guest",
        (CHAT, CODE, TALK | {"podsOf": "code"}),
        "config.models.talk.podsOf is code, which is in the pods of another model itself",
    ),
    _row(
        "a guest that shares otherwise than its host",
        (CHAT, CODE | {"sleep": {"replicas_per_gpu": 2}}),
        "config.models.code.podsOf is chat, but sleep.replicas_per_gpu is 2 here and 3 there",
    ),
    _row(
        "a guest that does not sleep",
        (CHAT, {key: value for key, value in CODE.items() if key != "sleep"}),
        "config.models.code.podsOf is chat, but sleep.replicas_per_gpu is 1 here and 3 there",
    ),
    _row(
        "a guest of a model that is not served",
        (CHAT | {"served": False}, CODE),
        "config.models.code is in the pods of chat, whose served is false",
        right=(CHAT | {"served": False}, CODE | {"served": False}, {"name": "other", "model": "/opt/m"}),
    ),
    _row(
        "a guest with other CPUs than its host",
        (CHAT, CODE | {"num_cpus": 2}),
        "config.models.code.num_cpus is 2 and that of chat is 1",
    ),
    _row(
        "a guest on another device",
        (CHAT, CODE | SIMULATED),
        "config.models.code.device is cpu and that of chat, in whose pods it is by podsOf, cuda",
    ),
    _row(
        "pods of a guest",
        (CHAT, CODE | {"pods": {"asleepSize": "1Gi"}}),
        "config.models.code has pods and podsOf: chat",
    ),
    _row(
        "a model that sleeps for nobody",
        (CHAT | {"sleep": {}},),
        "config.models.chat.sleep is set, but its pods have one engine",
    ),
    _row(
        "a model that could share and has no guest",
        (CHAT,),
        "config.models.chat.sleep is set, but its pods have no other model",
        "in other models podsOf: chat",
    ),
    _row(
        "weights that sleep in no memory",
        (CHAT | {"pods": {}}, CODE | LEVEL_2, TALK),
        "config.models.chat.sleep.level is 1 for 2 of the models in its pods, but asleepSize is empty",
        right=(CHAT | LEVEL_2 | {"pods": {}}, CODE | LEVEL_2),
    ),
    (
        "engines whose ports reach those of Ray",
        merged(sleeping(CHAT, CODE), {"config": {"protocol": {"port": 8074}}}),
        (
            "config.models.chat.sleep.replicas_per_gpu is 3 and config.protocol.port is 8074",
            "listen up to port 8076, but 8076 belongs to ",
        ),
        merged(sleeping(CHAT, CODE), {"config": {"protocol": {"port": 8073}}}),
    ),
]
