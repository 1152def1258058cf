"""The runtime builds one ingress from the configuration, without Ray: front ends, fleet clients, the app and its listener."""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from serve_app import VERSION
from serve_app.batch.service import BatchService
from serve_app.checkpoints import resolve_model
from serve_app.config import ModelSettings, Settings, cluster_token, default_cache_dir
from serve_app.config.keys_file import read_keyring
from serve_app.config.timeouts import SHUTDOWN_MARGIN_S
from serve_app.core.events import BlocksReported, PoolsPlanned, StepCostsMeasured, WaitsReported
from serve_app.core.fleet_report import describe, num_lines, num_on_draining
from serve_app.core.lost_replicas import with_lost
from serve_app.core.order_board import Waits
from serve_app.ingress.books import metrics
from serve_app.ingress.books.books import Books
from serve_app.ingress.books.gpu_time import GpuTime
from serve_app.ingress.books.request_metrics import begin_at_zero
from serve_app.ingress.fleet.fleet_client import FleetClient
from serve_app.ingress.fleet.quotas import ExchangeShares, Quotas
from serve_app.ingress.front_end.front_end import VLLM_VERSION, FrontEnd, Install, build_front_end
from serve_app.ingress.front_end.grammar_compiler import GrammarCompiler
from serve_app.ingress.http.callers import Tenants
from serve_app.ingress.http.listener import Listener
from serve_app.ingress.http.tokens import Tokens
from serve_app.ingress.routes.app import AppLimits, IngressApp
from serve_app.ingress.routes.generate import NEWLINE, NUL
from serve_app.ingress.routes.own_answers import FleetReport
from serve_app.links.tls import LinkTls, ingress_tls
from serve_app.membership import Lease

logger = logging.getLogger(__name__)

LAST_WORDS_S = SHUTDOWN_MARGIN_S / 2  # for the errors that end a drain; Serve ends the process after the whole margin


class FleetOrders:
    """The orders of all models' requests, which `Quotas` exchanges with other ingresses."""

    def __init__(self, fronts: Mapping[str, FrontEnd]) -> None:
        self._fronts = fronts

    def report(self) -> Waits:
        return {name: front.client.fleet.order.report() for name, front in self._fronts.items()}

    def answered(self, report: Waits) -> None:
        for name, waits in report.items():
            self._fronts[name].client.fleet.order.answered(waits)

    def learn(self, elsewhere: Waits) -> None:
        for name, waits in elsewhere.items():
            self._fronts[name].client.handle(WaitsReported(waits))


@dataclass
class IngressRuntime:
    """One ingress. Build it inside the event loop that will run it."""

    app: IngressApp
    listener: Listener
    front_ends: dict[str, FrontEnd]
    grammars: GrammarCompiler
    batches: BatchService | None = None
    vllm_version: str = VLLM_VERSION

    @classmethod
    async def build(
        cls,
        settings: Settings,
        *,
        ingress_id: str,
        fleet_id: str,
        report: FleetReport | None = None,
        exchange_shares: ExchangeShares | None = None,
    ) -> Self:
        """Build the front end of every model; takes seconds each.

        Args:
            report: The answer to `/fleet` without the replicas that this ingress has lost; without it, there is no such route.
            exchange_shares: Exchanges shares of quotas with other ingresses; None for an ingress that has no other beside it.
        Raises:
            ConfigError: A file that the settings name cannot be used.
        """
        file = settings.ingress.keys_file
        tokens = None if (oidc := settings.ingress.oidc) is None else Tokens(oidc)
        tenants = None if file is None else Tenants(file, partial(read_keyring, settings), tokens=tokens)
        grammars = GrammarCompiler()
        tls = ingress_tls(settings.protocol.tls)
        fronts = {m.name: await cls._front_end(settings, m, ingress_id, grammars, tls) for m in settings.models.values()}
        batches = None if (storage := settings.ingress.batch) is None else await asyncio.to_thread(BatchService, storage)
        quotas = None
        if tenants is not None:
            stored = None if batches is None else batches.store
            quotas = Quotas(ingress_id, exchange_shares, stored=stored, orders=FleetOrders(fronts), tenant=tenants.tenant)
        for front in fronts.values():
            front.client.intake.quotas = quotas
        limits = AppLimits(
            settings.ingress.max_body_bytes,
            stream_silence_s=settings.timeouts.stream_silence_s,
            max_loop_lag_s=settings.ingress.max_loop_lag_s,
        )
        gpu_times = {name: GpuTime(front.model.gpus_per_replica) for name, front in fronts.items()}
        app = IngressApp(
            fronts,
            limits,
            version=_version(settings),
            tenants=tenants,
            quotas=quotas,
            fleet_id=fleet_id,
            books=Books.of(settings, ingress_id, gpu_times, partial(_cause_of_loss, fronts)),
            sagemaker=settings.ingress.sagemaker_routes,
            generate_end=NUL if settings.ingress.generate_delimiter == "nul" else NEWLINE,
            batches=batches,
            report=None if report is None else partial(_report, report, fronts),
            cors_origins=settings.ingress.cors_origins,
        )
        canaries = {canary.front.model.name: canary.describe for canary in app.canaries.values()}
        begin_at_zero(["", *fronts])
        fleets = (front.client.fleet for front in fronts.values())
        metrics.register(fleets, canaries, _configured(settings), app.books.tenant_names)
        return cls(app, Listener(app, settings.ingress), fronts, grammars, batches)

    @staticmethod
    async def _front_end(
        settings: Settings,
        model: ModelSettings,
        ingress_id: str,
        grammars: GrammarCompiler,
        tls: LinkTls | None,
    ) -> FrontEnd:
        token = cluster_token(settings)
        client = FleetClient(settings, model, ingress_id=ingress_id, token=token, tls=tls)
        path = await asyncio.to_thread(resolve_model, model.model, default_cache_dir())
        return await build_front_end(model, path, client, grammars, installer_of(settings))

    def start(self) -> list[asyncio.Task[Any]]:
        """Start batches, the clients' loops, and the watches of the event loop and of the tenants; the caller owns the tasks."""
        if self.batches is not None:
            app = self.app
            self.batches.start(app.answer_line, app.models_of, app.problem_of_line, state_of_key=app.state_of_key)
        clients = [asyncio.create_task(front.client.run(), name=f"fleet {name}") for name, front in self.front_ends.items()]
        watches = [asyncio.create_task(self.app.lag.watch(), name="loop lag")]
        if self.app.tenants is not None:
            watches.append(asyncio.create_task(self.app.tenants.watch(), name="tenants"))
            if (tokens := self.app.tenants.tokens) is not None:
                watches.append(asyncio.create_task(tokens.keys.watch(), name="issuer"))
        if self.app.quotas is not None:
            watches.append(asyncio.create_task(self.app.quotas.run(), name="quotas"))
        return [*watches, *clients]

    async def prepare_grammars(self) -> None:
        """Start the processes that check grammars, so that the first request with one need not wait for that."""
        for name, front in self.front_ends.items():
            try:
                if front.grammars is not None:
                    await front.grammars.prepare()
            except Exception:  # xgrammar's, for an unknown tokenizer, or the process's: requests with a grammar get the error
                logger.exception("the grammar checks of %r cannot be prepared", name)

    async def drain(self, limit_s: float) -> None:
        """Take no new connections and let requests end; those that still run after ``limit_s`` end by an error.

        Batches stop at once: the next ingress continues them.
        """
        stopping = asyncio.ensure_future(self.listener.stop())
        giving_up = asyncio.ensure_future(asyncio.sleep(0) if self.batches is None else self.batches.stop())
        if not (await asyncio.wait([stopping], timeout=limit_s))[0]:
            logger.warning(
                "%d requests still run after a drain of %g s; each is ended by an error", self.app.num_running, limit_s
            )
            self.app.end_all()
            await asyncio.wait([stopping], timeout=LAST_WORDS_S)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        if self.app.quotas is not None:
            await self.app.quotas.leave()
        await giving_up
        await self.grammars.close()
        if self.batches is not None:
            await asyncio.to_thread(self.batches.close)
        await asyncio.to_thread(self.app.books.close)

    def set_members(self, leases: Iterable[Lease]) -> None:
        leases = list(leases)
        members = [lease for lease in leases if lease.role == "replica"]
        self.app.books.learn_step_costs((member.model, member.load.get("step_costs")) for member in members)
        quarantined = [block for lease in leases for block in lease.quarantined]
        condemned = {release: reason for lease in leases for release, reason in lease.condemned}
        for canary in self.app.canaries.values():
            canary.learn(condemned)
        for name, front in self.front_ends.items():
            # A canary is judged by its own replicas. Those of the release before it, which an update replaces, are not meant.
            release = None if front.model.canary is None else front.model.release()
            front.client.set_members([member for member in members if release in (None, member.release)])
            if blocks := [(fingerprint, left_s) for model, fingerprint, left_s in quarantined if model == name]:
                front.client.handle(BlocksReported(blocks))
            shares = [member.prefill_share for member in members if member.model == name and member.prefill_share is not None]
            if shares and front.model.replicas.is_scaled:  # else the share is one of an earlier configuration
                front.client.handle(PoolsPlanned(shares[0]))
            if (costs := self.app.books.step_costs(name)) is not None:
                front.client.handle(StepCostsMeasured(costs))

    def keys_file_state(self) -> dict[str, Any]:
        """Return whether the file of tenants or keys is in force, and its last change, for the lease; empty without such a file."""
        if (tenants := self.app.tenants) is None:
            return {}
        return {"tenants_file_in_force": tenants.file_in_force, "tenants_file_change": tenants.last_change}

    def quarantined(self) -> tuple[tuple[str, str, float], ...]:
        """Return what the lease reports to other ingresses: model, fingerprint, seconds left."""
        return tuple((name, *block) for name, front in self.front_ends.items() for block in front.client.quarantined())

    def condemned(self) -> tuple[tuple[str, str], ...]:
        """Return what the lease reports to other ingresses: releases that this ingress found bad, and why."""
        return tuple(release for canary in self.app.canaries.values() for release in canary.condemned())

    def autoscaling_stats(self) -> dict[str, float]:
        """Return per model ``<counter>/<model>`` of its `Tally`, requests (``waiting``, ``draining``) and lines of batches.

        ``over_quota`` counts what quotas refused, with ``over_quota/`` for requests whose body, and so their model, was not read.

        Of lines there are ``lines_held``, ``lines_queued`` (in the queues of engines) and ``lines_per_s``, which open batches need, whoever
        runs them: each ingress reports the same.
        """
        over_quota = self.app.books.over_quota
        stats = {f"over_quota/{name}": float(over_quota[name]) for name in ("", *self.front_ends)}
        needed = {} if self.batches is None else self.batches.lines_per_s()
        for name, front in self.front_ends.items():
            fleet = front.client.fleet
            stats |= {f"{counter}/{name}": float(value) for counter, value in asdict(fleet.tally).items()}
            stats[f"waiting/{name}"] = float(len(fleet.waiting))
            stats[f"draining/{name}"] = float(num_on_draining(fleet))
            held, queued = num_lines(fleet)
            stats |= {f"lines_held/{name}": float(held), f"lines_queued/{name}": float(queued)}
            stats[f"lines_per_s/{name}"] = sum(
                needed.get(asked, 0.0) for asked in (name, *front.model.aliases, *front.model.adapters)
            )
        return stats

    def describe(self) -> dict[str, Any]:
        models = {name: describe(front.client.fleet) for name, front in self.front_ends.items()}
        for canary in self.app.canaries.values():
            models[canary.front.model.name]["canary"] = canary.describe()
        return models


def installer_of(settings: Settings) -> Install | None:
    """Return the function that installs the shortcuts; None where the settings switch them off."""
    if not settings.ingress.shortcuts:
        return None
    from serve_app.ingress import shortcuts  # not above: an ingress without shortcuts runs without their folder

    return shortcuts.install


async def _report(report: FleetReport, fronts: Mapping[str, FrontEnd]) -> dict[str, Any]:
    """Return the answer to `/fleet`. A link shows the loss of a replica at once, a lease only when it ends.

    Any API key may ask for `/fleet`, so a change of the tenants file is left out: it may name other tenants.
    """
    told = await report()
    for member in told["members"]:
        member["load"].pop("tenants_file_change", None)
    return with_lost(told, [front.client.links.lost for front in fronts.values()], now=time.time())


def _cause_of_loss(fronts: Mapping[str, FrontEnd], model: str, replica_id: str) -> str | None:
    """Return why this ingress has lost a replica of the model; None if that is not known."""
    return None if (front := fronts.get(model)) is None else front.client.links.lost.cause(replica_id)


def _configured(settings: Settings) -> dict[str, metrics.Configured]:
    models = settings.models.values()
    return {m.name: metrics.Configured(m.replicas.min, m.replicas.max, m.gpus_per_replica) for m in models}


def _version(settings: Settings) -> dict[str, Any]:
    """Return what `/version` says. Simulated engines are named: figures measured on them must say so."""
    simulated = {
        model.name: f"{profile if isinstance(profile := s.profile, str) else 'custom profile'}, time_scale {s.time_scale:g}"
        for model in settings.models.values()
        if (s := model.simulated) is not None
    }
    return {"version": VLLM_VERSION, "serve_app": VERSION, **({"simulated": simulated} if simulated else {})}
