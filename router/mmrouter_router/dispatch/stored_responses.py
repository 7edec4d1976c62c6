"""Responses that engines store: which engine has one, and the ids of new ones (docs/api.md#stored-responses)."""

from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.response_ids import ResponseIds
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.intake import ChatRequest, json_body
from mmrouter_router.intake.api_key_auth import Tenant

PREVIOUS = "previous_response_id"


class StoredResponses:
    """Finds the engines of stored responses. ``pools``: those whose engines store them; empty where none do."""

    def __init__(self, ids: ResponseIds, fleet: Fleet, pools: frozenset[str]) -> None:
        self.ids, self._fleet, self.pools = ids, fleet, pools

    def holder(self, response_id: str, tenant: str, param: str) -> Worker:
        """Return the engine that stores a tenant's response.

        Raises :class:`RequestError` (404) that names the field ``param``: for an id that is unknown or another
        tenant's, which look the same, and for an engine that is gone.
        """
        place = self.ids.place_in(response_id, tenant)
        if place is None:
            raise RequestError.unknown_response(response_id, param)
        for worker in self._fleet:
            if self.ids.place(worker.member.uid) == place:
                return worker
        raise RequestError.lost_response(response_id, param, "the engine that stored it is gone")

    def holder_of_previous(self, request: ChatRequest, tenant: Tenant) -> Worker | None:
        """Return the engine that stores the response which a request continues, ``None`` without one.

        Raises what :meth:`holder` raises, and :class:`RequestError` (400).
        """
        if request.endpoint != RESPONSES or request.body.get(PREVIOUS) is None:
            return None
        previous = json_body.required(request.body, PREVIOUS, str)
        if self.pools:
            return self.holder(previous, tenant.name, PREVIOUS)
        if tenant.salt is not None:
            message = f"'{PREVIOUS}': the engines of this deployment store no responses; send the conversation whole."
            raise RequestError.invalid(message, param=PREVIOUS, code="unsupported_parameter")
        return None

    def absent(self, response_id: str, param: str) -> RequestError:
        """Return the error for an engine that does not have a response which it was to store."""
        why = "the engine that stored it has restarted since, or the response was never completed"
        return RequestError.lost_response(response_id, param, why)
