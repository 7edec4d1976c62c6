"""Ids of responses that an engine stores: ``resp_<request id>_<place><proof>``.

The place is a keyed hash of the engine's pod, so every router finds the engine and no client learns its name. The proof
authenticates the id for one tenant. The router names the response in the engine's request, so the engine's answers,
events and errors have this id, and there is no table of ids that routers would have to share and could lose.
"""

import hmac
import re
from typing import Final

from blake3 import blake3

_FORM: Final = re.compile(r"resp_([0-9A-Za-z-]{1,64})_([0-9a-f]{16})([0-9a-f]{32})")
REMEMBERED: Final = 4096  # places of pods


class ResponseIds:
    """Makes and checks ids. All routers of a deployment have the same ``identity_key``."""

    def __init__(self, identity_key: bytes) -> None:
        self._key = blake3(b"ids of stored responses", key=identity_key).digest()
        self._places: dict[str, str] = {}

    def make(self, request_id: str, pod: str, tenant: str) -> str:
        """Return the id of a tenant's response that the engine of a pod (its uid) stores."""
        place = self.place(pod)
        return f"resp_{request_id}_{place}{self._proof(request_id, place, tenant)}"

    def place_in(self, response_id: str, tenant: str) -> str | None:
        """Return where a response is stored, ``None`` for an id that was not made for this tenant."""
        parts = _FORM.fullmatch(response_id)
        if parts is None or not hmac.compare_digest(parts[3], self._proof(parts[1], parts[2], tenant)):
            return None
        return parts[2]

    def place(self, pod: str) -> str:
        """Return the place of an engine by its pod's uid."""
        known = self._places.get(pod)
        if known is None:
            if len(self._places) >= REMEMBERED:
                self._places.clear()
            known = self._places[pod] = self._hash("place", pod)[:16]
        return known

    def _proof(self, request_id: str, place: str, tenant: str) -> str:
        return self._hash("proof", tenant, request_id, place)[:32]

    def _hash(self, *parts: str) -> str:
        return blake3("\0".join(parts).encode(), key=self._key).hexdigest()
