"""``serve-app status`` shows a fleet, and ``serve-app down`` ends it."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from serve_app.cli.options import AsJson
from serve_app.cli.rayservice import REDIS, Pod, RayService, judge, own_words
from serve_app.errors import ClusterFailed
from serve_app.ui.replicas import ready_of, replicas_of, target_of

Name = Annotated[str, typer.Argument(help="Name of the application; on Kubernetes, of the release.")]


def down(name: Name = "serve-app") -> None:
    """Stop a running `serve-app up`: streams end first, then everything goes."""
    from serve_app.cli.cluster import find_run, interrupt

    interrupt(find_run(name))
    typer.echo(f"{name} stopped")


def status(
    name: Name = "serve-app",
    address: Annotated[str, typer.Option(help="Ray cluster to ask; empty: the one `serve-app up` started here.")] = "",
    context: Annotated[str | None, typer.Option(help="Ask Kubernetes: a context of the kubeconfig.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Ask Kubernetes: the release's namespace.")] = None,
    url: Annotated[str, typer.Option(help="Ask an ingress by HTTP, as the fleet page does; without Ray's deployments.")] = "",
    key: Annotated[
        str,
        typer.Option(
            help="API key, if the ingress asks for one. Only the ingress knows which replicas were lost.",
            envvar="SERVE_APP_API_KEY",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show ingresses, replicas, targets, bounds, load and versions; on Kubernetes the RayService, its applications and its pods."""
    console = Console(highlight=False)
    if context is not None or namespace is not None:
        _show_release(name, context, namespace, console, as_json=as_json)
        return
    report = asked_by_http(url, key) if url else _report(name, address, key)
    if as_json:
        from serve_app.cli.fleet_state import fleet_state

        typer.echo(json.dumps({**report, "state": fleet_state(report)._asdict()}, indent=2))
    else:
        show(report, console)


def _report(name: str, address: str, key: str) -> dict[str, Any]:
    """Return the report of `collect`, with what an ingress on this machine adds if it answers: lost and starting replicas."""
    from serve_app.cli.cluster import connect_to_run

    report = collect(name, connect_to_run(name, address))
    if not (report["url"] and report["members"]):
        return report
    try:
        return with_losses(report, asked_by_http(report["url"], key))
    except ClusterFailed as exc:
        typer.echo(f"lost replicas are not shown: {exc}", err=True)
        return report


def with_losses(report: Mapping[str, Any], seen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report of `collect` with the targets, starting and lost replicas that an ingress has ``seen`` (`asked_by_http`)."""
    lost = {member["replica_id"] for member in seen["members"] if member["state"] == "lost"}
    members = [{**member, "state": "lost"} if member["replica_id"] in lost else member for member in report["members"]]
    return {**report, "members": members, **{key: seen[key] for key in ("time", "models", "lost") if key in seen}}


def asked_by_http(url: str, key: str = "") -> dict[str, Any]:
    """Return the report of the ingress at ``url`` about the fleet, in the form of `collect`.

    Raises:
        ClusterFailed: The ingress refuses or does not answer, or the answer has another form.
    """
    import requests

    from serve_app.cli.fleet_shape import problem_of

    if not url.startswith(("http://", "https://")):
        raise ClusterFailed(
            f"{url!r} is not a URL of http or https", f"for example http://{url.rpartition('://')[2] or '127.0.0.1:8010'}"
        )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # Without an `auth`, requests would replace the key by a password of ~/.netrc.
        answer = requests.get(f"{url.rstrip('/')}/fleet", headers=headers, timeout=5, auth=lambda request: request)
        report = answer.json() if answer.ok else {}
    except requests.ConnectionError as exc:
        raise ClusterFailed(f"nothing answers at {url}", "start the service, or name another address by --url") from exc
    except (requests.RequestException, ValueError) as exc:
        raise ClusterFailed(f"{url} does not report its fleet: {exc}", "is an ingress of serve-app there?") from exc
    if not answer.ok:
        hint = f"give {'another' if key else 'an'} API key by --key" if answer.status_code == 401 else ""
        raise ClusterFailed(f"{url} answered {answer.status_code} to GET /fleet", hint)
    if problem := problem_of(report):
        raise ClusterFailed(f"{url} does not report its fleet: {problem}", "is an ingress of serve-app of this version there?")
    return {"name": "fleet", "url": url, "status": "", "deployments": {}, **report}


def collect(name: str, url: str) -> dict[str, Any]:
    """Return the report of the application: Serve's deployments and the members' leases."""
    from serve_app.cli.cluster import members
    from serve_app.cli.up import application_status, serve_details

    application = application_status(name)
    deployments = {} if application is None else application.deployments
    targets = {} if application is None else {key: target(details) for key, details in serve_details(name).items()}
    return {
        "name": name,
        "url": url,
        "status": "NOT_FOUND" if application is None else str(application.status.value),
        "message": "" if application is None else application.message,
        "deployments": {
            key: {
                "status": str(d.status.value),
                "message": d.message,
                "replica_states": dict(d.replica_states),
                **targets.get(key, {}),
            }
            for key, d in deployments.items()
        },
        "members": members(name),
    }


def target(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return bounds, target and rollout of a deployment, from Serve's details.

    ``rollout`` is "" once every replica has the wanted version; until then it is Serve's action in progress.
    """
    config = details["deployment_config"]
    scaling = config.get("autoscaling_config") or {}
    wanted = details["target_num_replicas"]
    rollout = "" if details["status"] == "HEALTHY" else details["status_trigger"]
    return {
        "min": scaling.get("min_replicas", wanted),
        "max": scaling.get("max_replicas", wanted),
        "target": wanted,
        "rollout": rollout.lower().replace("_", " "),
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the report in 80 columns: its state, Serve's deployments and messages, the ingresses, and the replicas of each model."""
    from serve_app.cli.fleet_state import fleet_state

    console.print(f"{report['name']}: {': '.join(fleet_state(report))}", markup=False)
    versions = sorted({lease["vllm_version"] for lease in report["members"]} - {""})
    vllm = f"vLLM {', '.join(versions)}" if versions else ""
    serves = f"Ray Serve reports {report['status']}" if report["status"] else ""  # a report of an ingress has none
    console.print("  ".join(filter(None, (report["url"], vllm, serves))), markup=False)
    rows = []
    for name, d in report["deployments"].items():
        states = ", ".join(f"{count} {state.lower()}" for state, count in d["replica_states"].items() if count)
        bounds = f"{d['min']}..{d['max']}" if "min" in d else ""
        wanted = str(d.get("target", ""))
        rows.append((name, d["status"], states or "0", wanted, bounds, d.get("rollout", "")))
    print_table(console, "", ("deployment", "Ray Serve", "replicas", "target", "bounds", "rollout"), rows)
    messages = {name: d["message"] for name, d in report["deployments"].items()} | {report["name"]: report.get("message", "")}
    for name, message in messages.items():
        if said := own_words(message):  # not a cell: a reason of several lines would become a narrow column of broken words
            console.print(f"\n{name}: {said}", markup=False)
    by_model: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for lease in sorted(report["members"], key=lambda m: (m["role"], m["model"], m["replica_id"])):
        by_model[lease["model"]].append(lease)
    absent = [*report.get("models", {}), *(lost["model"] for lost in report.get("lost", ()))]
    for model in dict.fromkeys([*by_model, *absent]):
        _print_members(console, model, by_model[model], report)


def _print_members(console: Console, model: str, leases: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> None:
    if not model:
        rows = [(*_common(lease), *_ingress_load(lease["load"])) for lease in leases]
        print_table(console, "", ("ingress", "state", "address", "pid", "streams", "waiting"), rows)
        canaries = [row for lease in leases for row in _canary_rows(lease)]
        print_table(console, "", ("canary", "of", "ingress", "state", "requests", "reason"), canaries)
        for said, names in _refused_changes(leases).items():
            console.print(f"\nwarning: {', '.join(names)}: {said}", style="yellow", markup=False)
        return
    leases = [lease for lease in leases if lease["state"] != "lost"]
    rows = [(*_common(lease), *_replica_load(lease["load"])) for lease in leases]
    title = model if target_of(report, model) is None else f"{model}: {ready_of(report, model)}"
    if not rows:
        console.print(f"\n{title}", markup=False)
    print_table(console, title, ("replica", "state", "address", "pid", "running", "waiting", "KV", "links"), rows)
    for replica in replicas_of(report, model) if "time" in report else ():
        if replica.member is None:
            console.print(f"{replica.replica_id}  {replica.state} {replica.doing}", markup=False)
    starts = [
        {"whole": load["start_s"], **load.get("cold_start", {})} for lease in leases if "start_s" in (load := lease["load"])
    ]
    print_table(console, "", ("start (s)", *_START), _start_rows(starts))


def _refused_changes(ingresses: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return what is wrong with the file of tenants or keys, and the ingresses that say so. `GET /fleet` does not show what is wrong."""
    unknown = "the changed file of tenants or keys has a mistake; the ingress's log says which"
    found: dict[str, list[str]] = defaultdict(list)
    for lease in ingresses:
        if not lease["load"].get("tenants_file_in_force", True):
            _, said = lease["load"].get("tenants_file_change", (0, unknown))
            found[said].append(lease["replica_id"])
    return found


_START = ("whole", "scheduled", "process", "import", "download", "load", "warm_up")
"""The phases of a replica's start. The last phase, listening, takes milliseconds and is left out."""


def _start_rows(starts: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    """Yield the median of every phase over the replicas, and the phases of the replica that took longest."""
    if starts:
        known = ([start[name] for start in starts if name in start] for name in _START)
        yield "median", *(f"{statistics.median(values):.1f}" if values else "" for values in known)
    if len(starts) > 1:
        slowest = max(starts, key=lambda start: start["whole"])
        yield "slowest", *(f"{slowest[name]:.1f}" if name in slowest else "" for name in _START)


def _common(lease: Mapping[str, Any]) -> tuple[str, ...]:
    return lease["replica_id"], lease["state"], f"{lease['host']}:{lease['port']}", str(lease["pid"])


def _ingress_load(load: Mapping[str, Any]) -> tuple[str, ...]:
    return str(load.get("streams", 0)), str(sum(m["waiting"] for m in load.get("models", {}).values()))


def _canary_rows(ingress: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield an ingress's judgement of each canary."""
    for name, load in ingress["load"].get("models", {}).items():
        if (canary := load.get("canary")) is not None:
            yield name, canary["of"], ingress["replica_id"], canary["state"], str(canary["requests"]), canary["reason"]


def _replica_load(load: Mapping[str, Any]) -> tuple[str, ...]:
    return str(load["running"]), str(load["waiting"]), f"{load['kv_usage']:.0%}", str(load["links"])


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table without borders. Columns that are empty in every row are left out; long cells are folded, never cut."""
    kept = list(rows)
    if not kept:
        return
    used = [i for i in range(len(columns)) if any(row[i] for row in kept)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i in used:
        table.add_column(columns[i], overflow="fold")
    for row in kept:
        table.add_row(*(row[i] for i in used))
    console.print(f"\n{title}" if title else "")
    console.print(table)


def _show_release(name: str, context: str | None, namespace: str | None, console: Console, *, as_json: bool) -> None:
    from serve_app.cli import kube
    from serve_app.cli.fleet_state import fleet_state, of_release

    cluster = kube.connect(context, namespace)
    service = cluster.ray_service(name)
    pods = cluster.pods(service)
    state = fleet_state(of_release(service, pods))
    if as_json:
        more = {"state": state._asdict(), "rollout": asdict(judge(service, pods)), "pods": [asdict(p) for p in pods]}
        typer.echo(json.dumps({**asdict(service), **more}, indent=2))
        return
    console.print(f"{name}: {': '.join(state)}", markup=False)
    console.print(f"namespace {cluster.namespace}" + (f", context {cluster.context}" if cluster.context else ""))
    show_release(service, pods, console)


def show_release(service: RayService, pods: Sequence[Pod], console: Console) -> None:
    """Print the state of a RayService: its conditions, and for each of its clusters the applications and the pods."""
    result = judge(service, pods)
    console.print(f"rollout {result.kind}: {result.line}")
    rows = [(kind, state.status, state.message) for kind, state in service.conditions.items()]
    print_table(console, "", ("condition", "status", "message"), rows)
    for role, cluster in (("active", service.active), ("pending", service.pending)):
        if cluster is None:
            continue
        states = [*cluster.applications.items(), *cluster.deployments.items()]
        rows = [(name, state.status, own_words(state.message)) for name, state in states]
        console.print(f"\n{role} cluster {cluster.name}")
        print_table(console, "", ("application", "Ray Serve", "message"), rows)
        mine = [_pod_row(p) for p in pods if p.cluster == cluster.name]
        print_table(console, "", _POD_COLUMNS, mine)
    if service.redis_address:
        own = [_pod_row(p) for p in pods if p.group == REDIS]
        console.print(f"\nRedis at {service.redis_address}" + ("" if own else ": no pod of this release"))
        print_table(console, "", _POD_COLUMNS, own)


_POD_COLUMNS = ("pod", "phase", "ready", "restarts", "node", "reason")


def _pod_row(p: Pod) -> tuple[str, ...]:
    return p.name.removeprefix(f"{p.cluster}-"), p.phase, "yes" if p.is_ready else "no", str(p.restarts or ""), p.node, p.reason
