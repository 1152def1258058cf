"""Served models are the models and adapters of an ingress; the name in a request's body selects the front end that answers it."""

from collections.abc import Mapping

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
        self._default = next(iter(self.listed.values()))
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

    def front_end(self, path: str, fields: BodyFields | None) -> FrontEnd:
        """Return the model's front end. A body whose ``model`` is no text goes to the first one, where vLLM reports the error.

        Raises:
            BadRequest: The client's id of the request cannot be used, or several models are served and the body names none.
            ModelNotFound: The named model is not served here.
            NotSupported: The body has a field of the Responses API that needs a store.
        """
        if fields is None:
            return self._default
        check_request_id("request_id", fields.request_id)
        if path == "/v1/responses":
            refuse_stored_responses(fields)
        if fields.model is None or fields.model == "":
            return self._the_only_one()
        if not isinstance(fields.model, str):
            return self._default
        front = self._by_name.get(fields.model) or self._others.get(fields.model)
        if front is None:
            raise ModelNotFound(model=fields.model, served=(*self.listed, *self._others))
        return front

    def _the_only_one(self) -> FrontEnd:
        if len(self.listed) > 1:
            raise BadRequest(param="model", problem=f"name one of {', '.join(self.listed)}")
        return self._default
