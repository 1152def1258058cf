"""Served models are the models and adapters of an ingress; the name in a request's body selects the front end that answers it."""

from collections.abc import Mapping

from serve_app.core.tenants import Caller
from serve_app.errors import BadRequest, ModelNotFound
from serve_app.ingress.front_end.front_end import FrontEnd
from serve_app.ingress.http.body_fields import BodyFields, check_request_id, refuse_stored_responses
from serve_app.ingress.routes.canary import Canary


class ServedModels:
    """The front ends of an ingress. ``by_name`` has at least one model that is no canary."""

    def __init__(self, by_name: Mapping[str, FrontEnd]) -> None:
        self._by_name = dict(by_name)
        self.listed = {name: front for name, front in by_name.items() if front.model.canary is None}
        """Front ends that clients see, by model name; canaries are not listed."""
        self._others = {name: front for front in by_name.values() for name in (*front.model.aliases, *front.adapters)}
        """Front ends by aliases and adapters."""
        self.canaries = {
            front.model.canary.of: Canary(front, by_name[front.model.canary.of].model)
            for front in by_name.values()
            if front.model.canary is not None
        }
        """Canaries by the name of the model whose requests they share."""

    @property
    def max_model_len(self) -> int:
        """Return the longest context of all models, in tokens."""
        return max(front.engine.model_config.max_model_len for front in self._by_name.values())

    def front_end(self, path: str, fields: BodyFields | None, caller: Caller | None) -> FrontEnd:
        """Return the model's front end. A body whose ``model`` is no text goes to the first one, where vLLM reports the error.

        A model that the caller may not ask is answered as one that does not exist, so that no tenant learns of another's models.

        Raises:
            BadRequest: The client's id of the request cannot be used, or several models are served and the body names none.
            ModelNotFound: The named model is not served here, or not to the caller.
            NotSupported: The body has a field of the Responses API that needs a store.
        """
        if fields is None:
            return self._first_of(self._allowed(caller))
        check_request_id("request_id", fields.request_id)
        if path == "/v1/responses":
            refuse_stored_responses(fields)
        if fields.model is None or fields.model == "":
            return self._the_only_one(self._allowed(caller))
        if not isinstance(fields.model, str):
            return self._first_of(self._allowed(caller))
        front = self._by_name.get(fields.model) or self._others.get(fields.model)
        if front is None or not (caller is None or caller.tenant.may_ask(_base(front))):
            allowed = self._allowed(caller)
            others = [name for name, front in self._others.items() if _base(front) in allowed]
            raise ModelNotFound(model=fields.model, served=(*allowed, *others))
        return front

    def _allowed(self, caller: Caller | None) -> Mapping[str, FrontEnd]:
        """Return the listed front ends that the caller may ask."""
        if caller is None or caller.tenant.models is None:
            return self.listed
        return {name: front for name, front in self.listed.items() if caller.tenant.may_ask(name)}

    def names(self, caller: Caller | None) -> list[str]:
        """Return all names under which the caller may ask, canaries, aliases and adapters included."""
        fronts = self._by_name | self._others
        return [name for name, front in fronts.items() if caller is None or caller.tenant.may_ask(_base(front))]

    @staticmethod
    def _first_of(allowed: Mapping[str, FrontEnd]) -> FrontEnd:
        for front in allowed.values():
            return front
        raise ModelNotFound(model="", served=())

    def _the_only_one(self, allowed: Mapping[str, FrontEnd]) -> FrontEnd:
        if len(allowed) > 1:
            raise BadRequest(param="model", problem=f"name one of {', '.join(allowed)}")
        return self._first_of(allowed)


def _base(front: FrontEnd) -> str:
    """Return the name of the model to which the right to ask this front end belongs: a canary belongs to its model."""
    return front.model.name if front.model.canary is None else front.model.canary.of
