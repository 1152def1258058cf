"""Who asks for accounts of requests: the ledger, traces, and clients that want a receipt."""

from typing import TYPE_CHECKING, Self

from starlette.types import Scope

from serve_app.config import Settings
from serve_app.errors import ServingError
from serve_app.ingress.books.ledger import Ledger
from serve_app.ingress.books.receipt import asks_for_receipt
from serve_app.ingress.exchange.account import Account
from serve_app.ingress.exchange.outcomes import Answer

if TYPE_CHECKING:  # OpenTelemetry's SDK is loaded only where traces are made
    from serve_app.ingress.books.tracing import Tracer


class Accounting:
    """At least one of the three is there; an ingress without any has no accounting. ``receipts``: clients may ask for them."""

    def __init__(self, *, ledger: Ledger | None = None, tracer: "Tracer | None" = None, receipts: bool = False) -> None:
        self.ledger = ledger
        self._tracer = tracer
        self._receipts = receipts

    @classmethod
    def of(cls, settings: Settings, ingress_id: str) -> Self | None:
        """Return what the settings ask for; None where they ask for nothing."""
        ledger = None if (where := settings.ingress.ledger) is None else Ledger(where, ingress_id)
        tracer = None
        if settings.tracing is not None:
            from serve_app.ingress.books.tracing import Tracer

            tracer = Tracer(settings.tracing, service=settings.name, ingress_id=ingress_id)
        receipts = settings.ingress.receipts
        return cls(ledger=ledger, tracer=tracer, receipts=receipts) if ledger or tracer or receipts else None

    def begin(self, path: str, key: str | None, scope: Scope) -> Account | None:
        """A request came with the API key of this name, None where no key is asked for. Return its account, if anybody wants one."""
        wants_receipt = self._receipts and asks_for_receipt(scope)
        if self.ledger is None and self._tracer is None and not wants_receipt:
            return None
        account = Account(0, path, key) if self.ledger is None else self.ledger.begin(path, key)
        if self._tracer is not None:
            self._tracer.begin(account, scope)
        account.wants_receipt = wants_receipt
        return account

    def end(self, account: Account, answer: Answer, error: ServingError | None, *, stalled: bool) -> None:
        """The request has ended. ``error``: what ended it, if the fleet or the ingress did; ``stalled``: its client read nothing."""
        if self.ledger is None and self._tracer is None:
            return
        if self.ledger is None:
            line = account.line(0, answer, error, stalled=stalled)
        else:
            line = self.ledger.end(account, answer, error, stalled=stalled)
        if self._tracer is not None:
            self._tracer.end(account, line)

    def close(self) -> None:
        """Write and send what waits; takes seconds at most."""
        if self.ledger is not None:
            self.ledger.close()
        if self._tracer is not None:
            self._tracer.close()
