"""This module declares the commands, their options and their help. Each imports its work when it is called, so `--help` imports none."""

from pathlib import Path
from typing import Annotated

import typer

from serve_app.cli.options import AsJson

ConfigFile = Annotated[Path, typer.Option("--file", "-f", help="The configuration file.")]


def check(
    file: Annotated[
        Path, typer.Argument(help="A configuration file, or Kubernetes manifests; - is standard input.", show_default=False)
    ],
    client_timeout_s: Annotated[float | None, typer.Option(help="Seconds after which clients give an answer up.")] = None,
    load_balancer_idle_s: Annotated[
        float | None, typer.Option(help="Seconds of silence after which the load balancer closes.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Name of a timeout rule that is broken on purpose; may be repeated.")
    ] = None,
    ask_vllm: Annotated[
        bool, typer.Option("--vllm/--no-vllm", help="Ask vLLM, too, about models whose checkpoint is on this machine.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check a configuration file, or manifests of a cluster, without starting anything.

    Exit status 0: the file can be used. 1: each line names a wrong key, or a timeout that ends before another timeout that it must outlast.
    """
    from serve_app.cli import check

    check.check(
        file,
        client_timeout_s=client_timeout_s,
        load_balancer_idle_s=load_balancer_idle_s,
        ignore=ignore or [],
        ask_vllm=ask_vllm,
        as_json=as_json,
    )


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(help="The configuration that is to run here. Default: the example for CPUs.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine: packages, torch's build, driver, ports, shared memory, memory, open files, and the configuration.

    Each line has its remedy. Exit status 0: a start can succeed, though lines marked `warning` may name what will be tight. 1: a line is
    marked `error`.
    """
    from serve_app.cli import doctor
    from serve_app.config import EXAMPLE

    doctor.doctor(file or EXAMPLE, as_json=as_json)


def fit(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CONFIG",
            help="A checkpoint's folder or config.json, a configuration file, or manifests; - is standard input.",
            show_default=False,
        ),
    ],
    gpu: Annotated[
        list[str],
        typer.Option(
            help="The kind of GPU: l4, a10g, l40s, a100-80gb, h100, ...; again as MODEL=KIND for one model of a CONFIG."
        ),
    ],
    gpus: Annotated[
        int | None,
        typer.Option(
            help="GPUs of a replica, on all its nodes. Default: the configuration's, or the fewest that do.", min=1, max=512
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes of a replica. Default: the configuration's, or 1.", min=1, max=64, show_default=False),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of the longest request: 16384, 16k (16,000), 16K (16,384). Default: the model's.")
    ] = None,
    requests_per_s: Annotated[
        list[str] | None,
        typer.Option(
            help="Rate for which replicas and their price are computed; also --requests/s; MODEL=RATE for one model of a CONFIG."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, for the replicas.", min=1, max=1 << 30)] = 500,
    answer: Annotated[int, typer.Option(help="Tokens of an answer, for the replicas.", min=1, max=1 << 30)] = 200,
    as_json: AsJson = False,
) -> None:
    """Estimate what a model needs: memory, GPUs, pods, AWS nodes, replicas for a rate. Reads files on this machine, downloads nothing.

    Exit status 0: it fits. 1: it cannot be estimated. 3: it does not fit, and what would is printed.
    """
    from serve_app.cli import fit

    fit.fit(
        source,
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        context=context,
        requests_per_s=requests_per_s or (),
        prompt=prompt,
        answer=answer,
        as_json=as_json,
    )


def plan(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A schedule.jsonl of serve-app-loadtest: a request a line.", show_default=False),
    ],
    profile: Annotated[
        str, typer.Option(help="The simulated accelerator and model, for example h100-llama-8b.", show_default=False)
    ],
    replicas: Annotated[int, typer.Option(help="Replicas in all.", min=2, max=16, show_default=False)],
    pd: Annotated[bool, typer.Option("--pd", help="The question, which has to be asked: would prefill and decode apart pay?")],
    gpus: Annotated[int, typer.Option(help="GPUs of a replica.", min=1, max=8)] = 1,
    link: Annotated[str, typer.Option(help="What connects replicas: nvlink-4, pcie-4, efa-100g, efa-400g.")] = "efa-100g",
    ttft_slo_s: Annotated[float, typer.Option(help="Limit of a good answer's first token.")] = 2.0,
    itl_slo_s: Annotated[float, typer.Option(help="Limit of 99 % of the gaps between a good answer's tokens.")] = 0.1,
    seconds: Annotated[float, typer.Option(help="So much of the trace is played.", min=5, max=600)] = 60.0,
    seeds: Annotated[int, typer.Option(help="Runs of each side.", min=1, max=20)] = 3,
    step_tokens: Annotated[
        int | None, typer.Option(help="max_num_batched_tokens. Default: vLLM's for this GPU.", min=64, max=1 << 20)
    ] = None,
    plot: Annotated[Path, typer.Option(help="The plot, an SVG.")] = Path("plan-pd.svg"),
    as_json: AsJson = False,
) -> None:
    """Simulate a trace on replicas that do everything, and with prefill and decode apart: table, verdict and plot. No GPU is needed.

    Exit status 0: it was simulated, whatever the verdict. 1: it cannot be.
    """
    from serve_app.cli import plan

    plan.plan(
        trace,
        profile=profile,
        gpus=gpus,
        replicas=replicas,
        link=link,
        limits=(ttft_slo_s, itl_slo_s),
        seconds=seconds,
        seeds=seeds,
        step_tokens=step_tokens,
        plot=plot,
        as_json=as_json,
    )


def top(
    url: Annotated[str, typer.Option(help="An ingress of serve-app.")] = "http://127.0.0.1:8010",
    key: Annotated[str, typer.Option(help="API key.", envvar="SERVE_APP_API_KEY")] = "",
    interval_s: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.5, max=60)] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the fleet once and end, as always where the output is no terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ingress's report, once, as JSON.")] = False,
) -> None:
    """Watch a fleet: replicas, queues, load, and what happens, until Ctrl-C."""
    from serve_app.cli import top

    top.top(url, key, interval_s=interval_s, once=once, as_json=as_json)


def explain(
    request: Annotated[str, typer.Argument(help="Id of the request: the client's X-Request-Id, or else the answer's id.")],
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DIR|FILE...", help="The folder of `ingress.ledger.dir`, of each node, or files of it."),
    ],
    as_json: AsJson = False,
) -> None:
    """Explain where a request went and why: each attempt, each move with its cause and costs, from the ledger.

    Exit status 0: it was found. 1: no line has this id. 2: there is no ledger, or it cannot be read.
    """
    from serve_app.cli import explain

    explain.explain(request, paths, as_json=as_json)


def up(
    file: ConfigFile,
    address: Annotated[str, typer.Option(help="Ray cluster to use; empty: start one here.")] = "",
    demo: Annotated[bool, typer.Option("--demo", help="The fleet page offers to kill an engine. Not with --address.")] = False,
) -> None:
    """Start what FILE describes, print the URL, and serve until Ctrl-C."""
    from serve_app.cli import up

    up.up(file, address, demo=demo)


def demo(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="The configuration file. Default: the example for CPUs.", show_default=False),
    ] = None,
) -> None:
    """Show a fleet at work: an answer, a replica that dies under a stream, a short load.

    Exit status 0: all went well. 1: something did not, or nothing could be started. 130: Ctrl-C.
    """
    from serve_app.cli import demo
    from serve_app.config import EXAMPLE

    demo.demo(file or EXAMPLE)


def rollout(
    name: Annotated[str, typer.Argument(help="The release: name of the RayService.")] = "serve-app",
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Manifests to apply first. Without: watch a change that was applied, by Helm for example."
        ),
    ] = None,
    context: Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current one.")] = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds after which the rollout counts as too slow.", min=1)] = 1800.0,
    poll_s: Annotated[float, typer.Option(hidden=True)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print at the end, on standard output, how it ended as JSON.")] = False,
) -> None:
    """Roll a change out on Kubernetes and wait until it runs.

    Exit status 0: the change runs. 1: nothing was changed, or the cluster cannot be asked. 3: the change failed. 4: it took too long. A
    failed change is left as it is, and the way back is printed: if KubeRay makes a new cluster for the change, the old one keeps serving.
    """
    from serve_app.cli import rollout

    rollout.rollout(name, file, context=context, namespace=namespace, timeout_s=timeout_s, poll_s=poll_s, as_json=as_json)


def ui(
    url: Annotated[str, typer.Option(help="The service: any OpenAI-style API; the fleet page needs an ingress of serve-app.")] = (
        "http://127.0.0.1:8010"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on. The pages have no login.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8011,
    ends_with_input: Annotated[bool, typer.Option(hidden=True)] = False,
    kills: Annotated[bool, typer.Option("--kills", hidden=True)] = False,
) -> None:
    """Serve the chat page and the fleet page for a service that runs, until Ctrl-C. Needs Gradio: pip install 'serve-app\\[ui]'."""
    from serve_app.cli import ui

    ui.ui(url, host, port, ends_with_input=ends_with_input, kills=kills)
