"""Each file of k8s/cluster/values/models renders, passes the check, and its models fit the GPUs, pods and nodes of the README there."""

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from serve_app.cli.manifests import manifest_problems
from serve_app.cli.rendered_models import rendered_models
from serve_app.simulated.profiles import ACCELERATORS
from serve_app.sizing.architecture import architecture_of
from serve_app.sizing.estimate import Estimate, Wish, estimate
from serve_app.sizing.nodes import HOURS_PER_MONTH, INSTANCES, PRICES_OF, Instance, pod_sizes
from tests.chart.render import Rendered, merged, render, tool
from tests.k8s.test_cluster_files import FILLED_IN, gpu_pool, requirement
from tests.sizing import shapes

pytestmark = pytest.mark.skipif(tool("helm") is None, reason="helm is not installed")

VALUES = Path(__file__).parents[2] / "k8s/cluster/values"
README = (VALUES / "models/README.md").read_text()
VARIABLES = FILLED_IN | {
    "REVISION": "a" * 40,
    "REVISION_EMBEDDING": "b" * 40,
    "REGION": "eu-west-1",
    "BUCKET": "my-bucket",
    "SUMS": "c" * 64,
    "ADAPTER_REPOSITORY": "my-org/support-lora",
}
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A file, the node type that its pods are meant for, and the config.json of each of its models."""

    instance: str
    configs: dict[str, shapes.Config]


CASES = {
    "serve-app": Case("g6e.2xlarge", {"llama-3.1-8b-instruct": shapes.LLAMA_8B}),
    "8b-l4": Case("g6.2xlarge", {"llama-3.1-8b-instruct": shapes.LLAMA_8B_FP8}),
    "32b-l40s": Case("g6e.2xlarge", {"qwen3-32b": shapes.QWEN3_32B_AWQ}),
    "32b-2xl40s": Case("g6e.12xlarge", {"qwen3-32b": shapes.QWEN3_32B_FP8}),
    "70b-fp8-8xl40s": Case("g6e.48xlarge", {"llama-3.3-70b-instruct": shapes.LLAMA_70B_DYNAMIC}),
    "moe-8xh100": Case("p5.48xlarge", {"qwen3-235b-a22b": shapes.QWEN3_235B_FP8}),
    "two-models-turns": Case("g6e.2xlarge", {"llama-3.1-8b-instruct": shapes.LLAMA_8B, "qwen2.5-14b-instruct": shapes.QWEN_14B}),
    "chat-and-embeddings": Case(
        "g6.2xlarge", {"llama-3.1-8b-instruct": shapes.LLAMA_8B_FP8, "qwen3-embedding-0.6b": shapes.QWEN3_EMBEDDING}
    ),
    "own-bucket-lora-zero": Case("g6e.2xlarge", {"chat": shapes.LLAMA_8B}),
}
"""Every file by its name without suffix; serve-app is the one that they are laid over."""


def filled(name: str) -> list[str]:
    """Return the texts of the README's command, as `envsubst` fills them in: ../serve-app.yaml, none.yaml and the file."""
    files = ["serve-app.yaml"] if name == "serve-app" else ["serve-app.yaml", "models/none.yaml", f"models/{name}.yaml"]
    return [Template((VALUES / file).read_text()).substitute(VARIABLES) for file in files]


def values_of(name: str) -> dict[str, Any]:
    return merged(*map(yaml.safe_load, filled(name)))


@functools.cache
def rendered(name: str) -> Rendered:
    """Return what helm makes of the files; helm itself merges them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.yaml") for number, _ in enumerate(filled(name))]
        for file, text in zip(files, filled(name), strict=True):
            file.write_text(text)
        return render(files=tuple(files))


def instance_of(name: str) -> Instance:
    (found,) = (each for each in INSTANCES if each.name == CASES[name].instance)
    return found


def estimates(name: str) -> Iterator[tuple[str, dict[str, Any], Estimate]]:
    """Yield each model's name, rendered settings and estimate on the GPUs of the case's node."""
    for model, settings in rendered(name).config["models"].items():
        wish = Wish(
            accelerator=ACCELERATORS[instance_of(name).accelerator],
            num_gpus=settings["gpus_per_replica"],
            engine_args=settings["engine_args"] | {"enable_lora": bool(settings.get("adapters"))},
        )
        yield model, settings, estimate(architecture_of(CASES[name].configs[model], model), None, wish)


def checkpoint_gib(name: str, model: str) -> int:
    """Return `checkpointSize` of a model in GiB: its own, else that of all."""
    values = values_of(name)
    own = values["config"]["models"][model].get("pods", {})
    return int(str((values["modelPods"] | own)["checkpointSize"]).removesuffix("Gi"))


def pod_of(name: str, model: str) -> dict[str, Any]:
    """Return the pod of a model. Its group's name has dashes for dots and then ends by a digest."""
    (found,) = (
        group["template"]["spec"]
        for group in rendered(name).cluster["workerGroupSpecs"]
        if group["groupName"].startswith(f"model-{model.replace('.', '-')}")
    )
    return dict(found)


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in (VALUES / "models").glob("*.yaml")} == CASES.keys() - {"serve-app"} | {"none"}


@pytest.mark.parametrize("name", CASES)
def test_the_chart_and_the_check_take_the_file(name: str) -> None:
    made = rendered(name)
    assert made.config["models"].keys() == CASES[name].configs.keys()
    assert list(manifest_problems(made.text, client_s=900, load_balancer_idle_s=None)) == []


@pytest.mark.parametrize("name", CASES)
def test_its_models_fit_their_gpus_and_the_pods_memory_holds_the_checkpoint(name: str) -> None:
    node = instance_of(name)
    for model, settings, found in estimates(name):
        assert found.fit.fits, found.ways_out
        assert not [note for note in found.notes if "measure it" in note]
        stated = checkpoint_gib(name, model)
        assert found.checkpoint_bytes <= stated * GIB <= 1.15 * found.checkpoint_bytes + GIB  # 15 %: fit's error for 4 bits
        limit = pod_sizes(settings["gpus_per_replica"]).limit_of_chart_gib(stated)
        assert limit * 1024 <= node.pods_memory_mib
        assert node.replicas(settings["gpus_per_replica"], pod_sizes(settings["gpus_per_replica"])) >= 1


@pytest.mark.parametrize("name", CASES)
def test_the_chart_gives_its_pods_the_sizes_that_fit_prints(name: str) -> None:
    for model, settings in rendered(name).config["models"].items():
        sizes, pod = pod_sizes(settings["gpus_per_replica"]), pod_of(name, model)
        resources = pod["containers"][0]["resources"]
        (shm,) = (v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory")
        assert resources["requests"]["memory"] == f"{sizes.memory_request_gib}Gi"
        assert resources["limits"]["memory"] == f"{sizes.limit_of_chart_gib(checkpoint_gib(name, model))}Gi"
        assert shm == f"{sizes.shm_gib}Gi"


@pytest.mark.parametrize("name", CASES)
def test_fit_finds_in_what_the_chart_makes_the_repositories_of_the_models_and_their_pods(name: str) -> None:
    values = values_of(name)
    sources = {f"/models/{each['path']}": each["source"] for each in values["weights"]["downloads"]}
    found = list(rendered_models(rendered(name).text))
    assert {each.settings.name for each in found} == CASES[name].configs.keys()
    for each in found:
        path = values["config"]["models"][each.settings.name]["model"]
        assert each.source == sources[path].removeprefix("hf:")
        sizes = pod_sizes(each.settings.gpus_per_replica)
        limit = sizes.limit_of_chart_gib(checkpoint_gib(name, each.settings.name))
        assert each.pod == replace(sizes, memory_limit_gib=limit)


def nodes(name: str, bound: str) -> int:
    """Return the nodes at the `min` or `max` of all models' replicas, and no more GPUs than `autoscaling.max_gpus`."""
    config, node = rendered(name).config, instance_of(name)
    num = 0
    for settings in config["models"].values():
        num += -(-settings["replicas"][bound] // per_node(name, settings["gpus_per_replica"]))
    most = config.get("autoscaling", {}).get("max_gpus")
    return num if most is None else min(num, most // node.num_gpus)


def per_node(name: str, num_gpus: int) -> int:
    return (
        1 if values_of(name)["modelPods"].get("onePerNode", True) else instance_of(name).replicas(num_gpus, pod_sizes(num_gpus))
    )


def row(name: str) -> str:
    """Return the row of the README's table."""
    node = instance_of(name)
    assert node.usd_per_hour is not None
    fits = [found.fit for _, _, found in estimates(name)]
    low, high = (nodes(name, bound) for bound in ("min", "max"))
    usd = node.usd_per_hour * HOURS_PER_MONTH
    cells = (
        "`../serve-app.yaml`" if name == "serve-app" else f"`{name}.yaml`",
        f"{low} to {high} x {node.name} ({node.num_gpus} x {node.accelerator.upper()})",
        ", ".join(f"{fit.context:,}" for fit in fits),
        ", ".join(str(fit.concurrency) for fit in fits),
        f"{low * usd:,.0f} to {high * usd:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", CASES)
def test_the_readme_has_its_nodes_context_and_costs(name: str) -> None:
    assert row(name) in README.splitlines()


def test_the_readme_dates_the_prices() -> None:
    assert f"prices of {PRICES_OF}" in README


@pytest.mark.parametrize("name", CASES)
def test_the_readme_names_the_requirements_of_a_node_pool_that_makes_its_nodes(name: str) -> None:
    """Those of the pool in karpenter.yaml stay where the node is the one that it makes."""
    node, pool = instance_of(name), gpu_pool()
    wanted = {"instance-gpu-name": node.accelerator, "instance-gpu-count": str(node.num_gpus), "instance-cpu": str(node.vcpus)}
    has_them = all(value in requirement(pool, f"karpenter.k8s.aws/{key}") for key, value in wanted.items())
    assert has_them or f"| {node.name} | {' | '.join(wanted.values())} |" in README.splitlines()
    assert int(values_of(name)["modelPods"]["gpusPerNode"]) == node.num_gpus


def test_the_files_show_turns_adapters_a_bucket_and_scale_to_zero() -> None:
    turns = rendered("two-models-turns").config
    assert turns["autoscaling"]["max_gpus"] < sum(model["gpus_per_replica"] for model in turns["models"].values())
    assert turns["timeouts"]["drain_s"] >= turns["timeouts"]["no_replica_s"]
    own = rendered("own-bucket-lora-zero")
    (chat,) = own.config["models"].values()
    assert (chat["replicas"]["min"], list(chat["adapters"])) == (0, ["chat-support"])
    assert "s3://my-bucket/llama-3.1-8b-instruct" in own.text


@pytest.mark.parametrize("name", ["serve-app", "8b-l4"])
def test_on_fsx_pods_mount_the_claim_of_its_file_and_nothing_is_downloaded(name: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.yaml" for number, _ in enumerate(filled(name))]
    for file, text in zip(files, filled(name), strict=True):
        file.write_text(text)
    made = render(files=(*files, VALUES / "fsx.yaml"))
    volume, claim = yaml.safe_load_all((VALUES.parent / "fsx.yaml").read_text())
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert [o["kind"] for o in made.objects if "weights" in o["metadata"]["name"]] == []
    (mounted,) = (v["persistentVolumeClaim"]["claimName"] for v in made.pod("model")["volumes"] if "persistentVolumeClaim" in v)
    assert mounted == claim["metadata"]["name"]
    assert claim["metadata"]["namespace"] == "serve-app"
    assert list(manifest_problems(made.text, client_s=900, load_balancer_idle_s=None)) == []
