"""The books of one ingress record every exchange: in metrics, and in the ledger, traces and receipts if they are configured."""

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from starlette.types import Scope, Send

from serve_app.config import Settings
from serve_app.core.step_costs import MeasuredCosts
from serve_app.ingress.books.gpu_time import GpuTime
from serve_app.ingress.books.key_latencies import KeyLatencies
from serve_app.ingress.books.ledger import Ledger, line_of
from serve_app.ingress.books.receipt import ReceiptSend, asks_for_receipt
from serve_app.ingress.books.recent import CauseOfLoss, RecentRequests, unknown
from serve_app.ingress.books.request_metrics import count_request
from serve_app.ingress.books.shown_names import MAX_TENANTS, CallerNames, ShownNames
from serve_app.ingress.books.tenant_use import TenantUse
from serve_app.ingress.exchange.exchange import Exchange

if TYPE_CHECKING:  # OpenTelemetry's SDK is loaded only if traces are made
    from serve_app.ingress.books.tracing import Tracer


class Books:
    """The records of each HTTP request that asks a model.

    Args:
        receipts: Whether clients may ask for receipts.
        max_latency_keys: How many API keys get latency series of their own; 0 for none.
        gpu_times: The GPU time of each model.
        recent: The ways of requests that have ended, for `/fleet/requests`.
    """

    def __init__(
        self,
        *,
        ledger: Ledger | None = None,
        tracer: "Tracer | None" = None,
        receipts: bool = False,
        max_latency_keys: int = 0,
        gpu_times: Mapping[str, GpuTime] = MappingProxyType({}),
        recent: RecentRequests | None = None,
    ) -> None:
        self.ledger = ledger
        self.recent = recent or RecentRequests()
        self._tracer = tracer
        self._receipts = receipts
        self._latencies = KeyLatencies(max_latency_keys)
        self.tenant_names = ShownNames(MAX_TENANTS)
        self._caller_names = CallerNames(self.tenant_names)
        self._tenant_use = TenantUse(self.tenant_names)
        self.over_quota: Counter[str] = Counter()
        """Model -> requests that quotas of their tenants refused, without lines of batches; "" for requests whose body was not read."""
        self._gpu_times = gpu_times

    @classmethod
    def of(
        cls,
        settings: Settings,
        ingress_id: str,
        gpu_times: Mapping[str, GpuTime] = MappingProxyType({}),
        cause: CauseOfLoss = unknown,
    ) -> Self:
        """Return the books that the settings ask for. ``cause`` tells why replicas were lost."""
        ledger = None if (where := settings.ingress.ledger) is None else Ledger(where, ingress_id)
        tracer = None
        if settings.tracing is not None:
            from serve_app.ingress.books.tracing import Tracer

            tracer = Tracer(settings.tracing, service=settings.name, ingress_id=ingress_id)
        ingress = settings.ingress
        return cls(
            ledger=ledger,
            tracer=tracer,
            receipts=ingress.receipts,
            max_latency_keys=ingress.key_latencies,
            gpu_times=gpu_times,
            recent=RecentRequests(cause),
        )

    def learn_step_costs(self, measured: Iterable[tuple[str, Any]]) -> None:
        """Take in what all replicas measured of themselves: model, and the lease's ``step_costs``, None if there are none."""
        measured = list(measured)
        for model, gpu_time in self._gpu_times.items():
            gpu_time.learn(costs for name, costs in measured if name == model)

    def step_costs(self, model: str) -> MeasuredCosts | None:
        """Return what the replicas of the model have measured; None if no replica has, or the books do not count its GPU time."""
        return None if (gpu_time := self._gpu_times.get(model)) is None else gpu_time.costs

    def begin(self, exchange: Exchange, scope: Scope, send: Send) -> Send:
        """Note that the exchange begins. Return ``send``, or a `ReceiptSend` around it if the client asks for a receipt."""
        if self.ledger is not None:
            self.ledger.begin(exchange)
        if self._tracer is not None:
            self._tracer.begin(exchange, scope)
        return ReceiptSend(send, exchange) if self._receipts and asks_for_receipt(scope) else send

    def end(self, exchange: Exchange) -> None:
        """Count an exchange that has ended, and write its line and its trace."""
        ending = exchange.end()
        count_request(exchange, ending, self._latencies, self._caller_names)
        self.recent.end(exchange, ending)
        if not exchange.background and ending.word() == "over_quota":
            self.over_quota[exchange.model] += 1
        if self.ledger is None and self._tracer is None and exchange.caller is None:
            return
        totals = exchange.requests.totals(ending.outcome)
        gpu_time = self._gpu_times.get(exchange.model)
        gpu_s = None if gpu_time is None else gpu_time.seconds(totals)
        self._tenant_use.note(exchange, totals, gpu_s)
        line = None if self.ledger is None else self.ledger.end(exchange, ending, totals, gpu_s)
        if self._tracer is not None:
            self._tracer.end(exchange, line or line_of(exchange, ending, totals, gpu_s, seq=0))

    def close(self) -> None:
        """Write and send the waiting lines and spans, which takes seconds at most."""
        if self.ledger is not None:
            self.ledger.close()
        if self._tracer is not None:
            self._tracer.close()
