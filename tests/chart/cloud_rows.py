"""These rows of test_lint.py are about values that Karpenter, ElastiCache, EBS or the AWS load balancer cannot use."""

from typing import Any

from tests.chart.lint_rows import Check
from tests.chart.places import ALB, CUDA, HUB, ROUTE
from tests.chart.render import at, merged, models

EVICT = "karpenter.sh/do-not-disrupt"
PRIMARY = "rediss://master.a.b.euc1.cache.amazonaws.com:6379"
ARN = "arn:aws:acm:eu-central-1:1:certificate/a"
INBOUND = "alb.ingress.kubernetes.io/inbound-cidrs"
GROUPS = "alb.ingress.kubernetes.io/security-groups"
LIMITED = {"limits": {"max_concurrent": 8}}
TWO = models(CUDA | {"replicas": {"min": 1, "max": 2}})


def redis(address: str, **more: str) -> dict[str, Any]:
    return {"gcsFaultTolerance": {"enabled": True, "address": address, **more}}


def public(**annotations: str) -> dict[str, Any]:
    """Return values of a load balancer that the internet reaches, but for what these annotations keep out."""
    return merged(ALB, at("ingress.albScheme", "internet-facing"), at("ingress.annotations", annotations))


def clients(*cidrs: str) -> dict[str, Any]:
    return at("networkPolicies.clients", [{"ipBlock": {"cidr": cidr}} for cidr in cidrs])


def pools(given: dict[str, Any]) -> dict[str, Any]:
    """Return values of a model on nodes of two GPUs, and of another on nodes of one, with these values of its pods."""
    small = CUDA | {"name": "n", "gpus_per_replica": 1, "pods": {"gpusPerNode": 1, **given}}
    return merged(models(CUDA, small), at("modelPods", {"gpusPerNode": 2, "nodeSelector": {"serve-app/nodes": "gpu"}}))


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
    *[
        (
            f"a public load balancer and {what}",
            merged(public(**annotations), given),
            ("open-without-limits: ingress.albScheme is internet-facing", says, f"{INBOUND}: 203.0.113.0/24"),
            merged(public(**better), mended),
        )
        for what, annotations, given, says, better, mended in (
            ("keys of nobody", {}, {}, "keys without tenants have no limits", {INBOUND: "203.0.113.0/24"}, {}),
            ("networks of all", {INBOUND: "10.0.0.0/8,0.0.0.0/0"}, {}, "keys without tenants", {GROUPS: "sg-1"}, {}),
            (
                "a tenant without limits",
                {},
                at("tenants.inline", {"a": LIMITED, "b": {"limits": {"max_tokens": 9}}}),
                "tenants.inline.b has no limits",
                {},
                at("tenants.inline", {"a": LIMITED, "b": LIMITED}),
            ),
        )
    ],
    *[
        (
            f"{cidr} in {place}",
            given,
            (f"cidr-wrong: {place} has {cidr}, which is no network", "such as 203.0.113.0/24"),
            mended,
        )
        for place, cidr, given, mended in (
            (
                f"ingress.annotations with {INBOUND}",
                "203.0.113.0/33",
                public(**{INBOUND: "203.0.113.0/33"}),
                public(**{INBOUND: "203.0.113.0/24, 2001:db8::/32"}),
            ),
            ("networkPolicies.clients", "10.0.0.0/40", clients("10.0.0.0/40"), clients("10.0.0.0/8", "fd00::/64")),
            ("networkPolicies.clients", "999.1.1.1/8", clients("10.0.0.0/8", "999.1.1.1/8"), clients("99.1.1.1/8")),
            *[
                ("networkPolicies.dns", wrong, at("networkPolicies.dns", [{"ipBlock": {"cidr": wrong}}]), {})
                for wrong in ("172.20.0.10", "172.20.0.256/32")
            ],
        )
    ],
    (
        "networks beside security groups, which replace them",
        public(**{INBOUND: "10.0.0.0/8", GROUPS: "sg-1"}),
        (f"ingress.annotations has {INBOUND} and {GROUPS}", "remove one of them"),
        public(**{GROUPS: "sg-1"}),
    ),
    (
        "nodes of one label and two sizes",
        pools({}),
        (
            "nodes-of-two-sizes: gpusPerNode is 1 for config.models.n and 2 for config.models.m",
            "give config.models.n.pods a nodeSelector of nodes with 1 GPU, ",
        ),
        pools({"nodeSelector": {"serve-app/nodes": "gpu-l4"}}),
    ),
    (
        "nodes of one label and two sizes, of another resource",
        pools({"gpuResource": "nvidia.com/gpu"}),
        ("nodes-of-two-sizes: gpusPerNode is 1 for config.models.n and 2 for config.models.m",),
        pools({"gpuResource": "nvidia.com/mig-1g.10gb"}),
    ),
    (
        "an office in the place of the load balancer's subnets",
        merged(ALB, clients("203.0.113.0/24")),
        ("clients-are-not-the-balancer: networkPolicies.clients has public addresses alone (203.0.113.0/24)", INBOUND),
        merged(ALB, clients("203.0.113.0/24", "100.64.0.0/16")),
    ),
    (
        "clients in the place of the load balancer's subnets",
        merged(ALB, at("ingress.annotations", {INBOUND: "10.20.0.0/16, 10.21.0.0/16"}), clients("10.21.0.0/16")),
        ("clients-are-not-the-balancer: networkPolicies.clients has 10.21.0.0/16, as ", INBOUND),
        merged(ALB, at("ingress.annotations", {INBOUND: "10.21.0.0/16"}), clients("10.21.0.0/16", "10.0.0.0/16")),
    ),
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
