"""These rows of test_lint.py are about values that Karpenter, ElastiCache, EBS or the AWS load balancer cannot use."""

from typing import Any

from tests.chart.lint_rows import Check
from tests.chart.places import ALB, CUDA, HUB, ROUTE
from tests.chart.render import at, merged, models

EVICT = "karpenter.sh/do-not-disrupt"
PRIMARY = "rediss://master.a.b.euc1.cache.amazonaws.com:6379"
ARN = "arn:aws:acm:eu-central-1:1:certificate/a"
TWO = models(CUDA | {"replicas": {"min": 1, "max": 2}})


def redis(address: str, **more: str) -> dict[str, Any]:
    return {"gcsFaultTolerance": {"enabled": True, "address": address, **more}}


def claim(**more: str) -> dict[str, Any]:
    return {"weights": {"enabled": True, "downloads": [HUB], **more}}


CLOUD: list[Check] = [
    *[
        (
            f"a {name} that keeps Karpenter from evicting",
            merged(models(CUDA | pods), given),
            (f"pods-not-evicted: {path}.podAnnotations has {EVICT}: true", "remove it"),
            merged(models(CUDA), at("modelPods.podAnnotations", {EVICT: "false"})),
        )
        for name, pods, given, path in (
            ("value of all models", {}, at("modelPods.podAnnotations", {EVICT: "true"}), "modelPods"),
            ("value of one model", {"pods": {"podAnnotations": {EVICT: "true"}}}, {}, "config.models.m.pods"),
        )
    ],
    *[
        (
            f"an address of Redis with {what}",
            redis(address),
            (f"redis-address-wrong: gcsFaultTolerance.address is {address}", f"write {better}"),
            redis(better),
        )
        for what, address, better in (
            ("a database", "rediss://r:6379/1", "rediss://r:6379"),
            ("another scheme", "https://r:6379", "rediss://r:6379"),
        )
    ],
    *[
        (
            f"an ElastiCache with a {key} and without TLS",
            redis(PRIMARY.replace("rediss://", scheme), **{key: "given"}),
            (f"gcsFaultTolerance.{key} is given: ElastiCache has passwords only with TLS", f"write {PRIMARY}"),
            redis(PRIMARY, **{key: "given"}),
        )
        for key, scheme in (("existingSecret", "redis://"), ("username", ""))
    ],
    *[
        (
            f"a reader endpoint {'with' if address.startswith('rediss') else 'without'} TLS",
            redis(address),
            (f"redis-read-only: gcsFaultTolerance.address is {address}", "name the primary endpoint"),
            redis(PRIMARY),
        )
        for address in [PRIMARY.replace("master.", "replica.")]
    ],
    (
        "a certificate's name",
        merged(ALB, at("ingress.albCertificateArn", "my-cert")),
        ("certificate-without-arn: ingress.albCertificateArn is my-cert", "aws acm list-certificates"),
        merged(ALB, at("ingress.albCertificateArn", f"{ARN},{ARN}b")),
    ),
    *[
        (
            f"a URL in {path}",
            merged(base, at(path, [host])),
            (f"host-is-no-name: {path} has {host}", "such as llm.acme.example: remove scheme"),
            merged(base, at(path, ["*.acme.example"])),
        )
        for path, base, host in (
            ("ingress.hosts", ALB, "https://llm.acme.example/v1"),
            ("httpRoute.hostnames", ROUTE, "LLM.acme.example:443"),
        )
    ],
    (
        "a claim of one node for replicas of several",
        merged(TWO, claim(accessMode="ReadWriteOnce")),
        ("weights.accessMode is ReadWriteOnce, but config.models.m.replicas.max is 2", "ReadWriteMany"),
        merged(models(CUDA), claim(accessMode="ReadWriteOnce")),
    ),
    (
        "a class of EBS for many readers",
        merged(TWO, claim(storageClass="gp3")),
        ("weights.storageClass is gp3 and weights.accessMode is ReadWriteMany", "EFS, FSx or NFS"),
        merged(TWO, claim(storageClass="efs")),
    ),
]
