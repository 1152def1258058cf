"""This module prints an estimate of `serve-app fit`: as lines of at most 80 columns, or as JSON."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from serve_app.sizing.estimate import Estimate
from serve_app.sizing.fits import GIB, Fit
from serve_app.sizing.nodes import PRICES_OF, Nodes

WIDTH = 80
_LABEL, _AMOUNT = 18, 15
_MOST_TYPES = 2


def lines_of(name: str, found: Estimate) -> Iterator[str]:
    """Yield the lines for a model: what it is, whether it fits, and why; what to order only if it fits."""
    yield from textwrap.wrap(f"{name}: {_model(found)}", WIDTH, break_on_hyphens=False)
    yield from textwrap.wrap(_verdict(found), WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    rows = [*_memory(found), *_contexts(found)]
    if found.fit.fits:
        rows += [*_pods(found), *_nodes(found), *_replicas(found)]
    for row in rows:
        yield from _row(*row)
    for note in found.notes:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")


def _verdict(found: Estimate) -> str:
    of = found.fit
    where = f"on {of.num_gpus} x {of.accelerator.name} with requests of {of.context:,} tokens"
    if of.fits:
        return f"It fits {where}." if found.shape.is_encoder else f"It fits {where}, {of.concurrency} at once."
    ways = f"What would fit: {'; '.join(found.ways_out)}" if found.ways_out else "No GPU that is known here would hold it"
    return f"It does not fit {where}. {ways}."


def _row(label: str, amount: str, rest: str) -> Iterator[str]:
    """Yield a label, an amount and its explanation, which is wrapped below itself."""
    first, *more = textwrap.wrap(rest, WIDTH - _LABEL - _AMOUNT - 2, break_on_hyphens=False) or [""]
    yield f"{label:<{_LABEL}}{amount:>{_AMOUNT}}  {first}".rstrip()
    for line in more:
        yield " " * (_LABEL + _AMOUNT + 2) + line


def _model(found: Estimate) -> str:
    counts, shape = found.counts, found.shape
    active = f", {_billions(counts.active)} of them for a token" if counts.active != counts.total else ""
    kind = shape.quantization.method if shape.quantization else shape.dtype or "type not named"
    return f"{shape.family or 'unnamed'}, {_billions(counts.total)} parameters{active}, {kind}"


def _memory(found: Estimate) -> Iterator[tuple[str, str, str]]:
    of = found.fit
    yield (
        f"on {of.num_gpus} x {of.accelerator.name}",
        _gib(of.accelerator.memory_bytes),
        f"each; {of.plan.utilization:.0%} for vLLM{_on_nodes(of)}{_in_stages(of)}",
    )
    weight_error = found.weight_error if found.weight_error.startswith("exact") else f"error {found.weight_error}"
    yield "  weights", _gib(of.weight_bytes), f"of each GPU; {weight_error}"
    if (places := of.plan.adapters) is not None:
        text = f"{places.num} LoRA adapters of rank {places.rank}; {found.adapter_error}"
        yield "  adapters", _gib(of.adapter_bytes), text
    yield "  reserve", _gib(of.reserve_bytes), f"activations, graphs; error {found.reserve_error}"
    yield ("  left" if found.shape.is_encoder else "  KV cache"), _gib(of.kv_bytes), "what is left, with the errors above"


def _on_nodes(of: Fit) -> str:
    return f"; {of.num_gpus // of.num_nodes} on each of {of.num_nodes} nodes" if of.num_nodes > 1 else ""


def _in_stages(of: Fit) -> str:
    stages = of.plan.stages
    return f"; {stages} stages, and below is stage {of.stage}, which holds the fewest requests" if stages > 1 else ""


def _contexts(found: Estimate) -> Iterator[tuple[str, str, str]]:
    of = found.fit
    if found.shape.is_encoder:
        yield "KV per token", "none", "an encoder has no KV cache"
        yield "longest text", f"{of.context:,}", "tokens"
        yield "tokens of a step", f"{of.plan.step_tokens:,}", "max_num_batched_tokens; a text is computed in one step"
        return
    per_token = of.request_bytes / of.context / 1024
    yield "KV per token", f"{per_token:,.4g} KiB", f"of each GPU, at {of.context:,} tokens; {found.kv_error}"
    yield "longest context", f"{of.longest_context:,}", f"the model allows {found.shape.max_tokens:,}"
    spread = GIB / max(1, of.request_bytes)
    error = f"{spread:.0f} more or fewer per GiB of error" if spread >= 1 else "a GiB of error is less than one"
    yield "requests at once", str(of.concurrency), f"of {of.context:,} tokens each; {error}"
    if found.offload_bytes:
        yield "KV in memory", _gib(found.offload_bytes), f"of the pod: {found.offload_tokens:,} tokens that left the GPU"


def _pods(found: Estimate) -> Iterator[tuple[str, str, str]]:
    pod = found.pod
    each = f", of each of {found.fit.num_nodes} pods" if found.fit.num_nodes > 1 else ""
    yield "pod: CPU", f"{pod.cpu_request:g} to {pod.cpu_limit:g}", f"request and limit, as the chart sets them{each}"
    yield (
        "pod: memory",
        f"{pod.memory_request_gib:g} to {pod.memory_limit_gib:g} GiB",
        f"/dev/shm of {pod.shm_gib:g} GiB included",
    )
    if not pod.prefetches(found.checkpoint_bytes):
        size = -(-found.checkpoint_bytes // GIB)
        limit = pod.limit_of_chart_gib(size)
        yield "", "", f"too little for vLLM to read ahead from NFS or Lustre. A limit of {limit:g} GiB, if nodes have it:"
        yield "", "", f"modelPods.checkpointSize: {size}Gi"


def _nodes(found: Estimate) -> Iterator[tuple[str, str, str]]:
    if not found.nodes:
        yield "nodes on AWS", "none", f"has {found.fit.num_gpus // found.fit.num_nodes} x {found.fit.accelerator.name} or more"
    for index, nodes in enumerate(found.nodes[:_MOST_TYPES]):
        instance = nodes.instance
        price = f"${instance.usd_per_hour:,.4g} an hour" if instance.usd_per_hour is not None else "price unknown"
        shape = f"{instance.num_gpus} GPU, {instance.vcpus} vCPU, {instance.memory_gib:,} GiB; {price}"
        yield "" if index else "nodes on AWS", instance.name, shape
    if found.nodes:
        yield "", "", f"on demand, us-east-1, {PRICES_OF}"


def _replicas(found: Estimate) -> Iterator[tuple[str, str, str]]:
    replicas, load = found.replicas, found.load
    if replicas is None or load is None:
        return
    amount = "1 replica" if replicas.num == 1 else f"{replicas.num:,} replicas"
    yield f"{load.requests_per_s:g} requests/s", amount, f"for {load.prompt_tokens:,} + {load.answer_tokens:,} tokens each"
    limits = f"first token in {load.slo.ttft_s:g} s, {1000 * load.slo.itl_s:g} ms a token, {load.headroom:.0%} headroom"
    yield "", "", f"{limits}; simulated, error tens of percent"
    yield "", f"{_figure(replicas.most_per_replica)}/s", "the most that one replica can serve"
    yield "", f"{_figure(1000 * replicas.token_s)} ms", f"a token, with {_figure(replicas.batch)} requests at once"
    yield "", f"{_figure(1000 * replicas.prompt_s)} ms", "a prompt, on an idle replica"
    if found.nodes and (cost := found.nodes[0].usd_per_month) is not None:
        yield "cost", f"${cost:,.0f}", f"a month (730 h): {_node_count(found.nodes[0])}"


def _figure(value: float) -> str:
    """Return a number with two or more digits."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _node_count(nodes: Nodes) -> str:
    shared = ", modelPods.onePerNode: false" if nodes.per_node > 1 else ""
    return f"{nodes.num} x {nodes.instance.name}{shared}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.1f} million"


def _gib(amount: int) -> str:
    return f"{amount / GIB:,.2f} GiB"


def as_json_value(found: Estimate) -> dict[str, Any]:
    """Return an estimate as a JSON value. Sizes are in bytes, and each estimate has its error in words."""
    of, shape = found.fit, found.shape
    return {
        "fits": of.fits,
        "ways_out": list(found.ways_out),
        "gpu": of.accelerator.name,
        "gpus": of.num_gpus,
        "nodes_of_a_replica": of.num_nodes,
        "stages": {"num": of.plan.stages, "deciding_stage": of.stage},
        "architecture": shape.family,
        "quantization": shape.quantization.method if shape.quantization else None,
        "parameters": found.counts.total,
        "active_parameters": found.counts.active,
        "weight_bytes": {"all": found.weight_bytes, "of_each_gpu": of.weight_bytes, "error": found.weight_error},
        "adapter_bytes": {"of_each_gpu": of.adapter_bytes, "error": found.adapter_error},
        "reserve_bytes": {"of_each_gpu": of.reserve_bytes, "error": found.reserve_error},
        "kv_bytes": {"of_each_gpu": of.kv_bytes, "of_a_request": of.request_bytes, "error": found.kv_error},
        "context": of.context,
        "longest_context": of.longest_context,
        "model_max_tokens": shape.max_tokens,
        "requests_at_once": of.concurrency,
        "pod": asdict(found.pod),
        "offload": {"bytes": found.offload_bytes, "tokens": found.offload_tokens},
        "replicas": None if found.replicas is None else asdict(found.replicas),
        "nodes": [
            {
                "type": nodes.instance.name,
                "gpus": nodes.instance.num_gpus,
                "vcpus": nodes.instance.vcpus,
                "memory_gib": nodes.instance.memory_gib,
                "usd_per_hour": nodes.instance.usd_per_hour,
                "nodes": nodes.num,
                "replicas_per_node": nodes.per_node,
                "usd_per_month": nodes.usd_per_month,
            }
            for nodes in found.nodes
        ],
        "prices_of": PRICES_OF,
        "notes": list(found.notes),
    }
