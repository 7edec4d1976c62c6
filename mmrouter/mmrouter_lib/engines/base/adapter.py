"""The interface of an engine adapter: what routers and sidecars use of one engine type.

Adapters do not import the resource's models, so the sidecar's serving process starts without pydantic. Command lines
are in :mod:`mmrouter_lib.engines.launchers`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mmrouter_lib.engines.base.events import Batch
from mmrouter_lib.engines.base.metrics import RankLoad
from mmrouter_lib.engines.base.request_rewriting import ImageRewrite, Rewritten
from mmrouter_lib.engines.base.server_info import EngineInfo

if TYPE_CHECKING:
    from mmrouter_lib.api import EngineType, Role


class RewriteChat(Protocol):
    """Make the body that the engine gets of a client's chat request."""

    def __call__(
        self, body: Mapping[str, Any], images: Sequence[ImageRewrite], *, model: str, cache_salt: str | None
    ) -> Rewritten:
        """Raises ``ValueError`` when an image names a part that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapter:
    """One engine type: its functions, its tables, and the capabilities that routers and operator branch on."""

    type: "EngineType"
    health_path: str

    # Events, metrics and information endpoints.
    decode_batch: Callable[[bytes], Batch]
    """Decode one message of the event stream. Raises ``EventError``."""
    metrics: Mapping[str, str]
    """Quantity (``running``, ``waiting``, ``kv_usage`` ...) -> metric name."""
    parse_load: Callable[[str], dict[int, RankLoad]]
    """Return data parallel rank -> load from the text of ``/metrics``."""
    parse_block_size: Callable[[str], int | None]
    """Return tokens per block from the text of ``/metrics``, ``None`` where it is not there."""
    info_paths: tuple[str, ...]
    """Endpoints that describe the engine; each answers a JSON object."""
    parse_info: Callable[[Sequence[Mapping[str, Any]]], EngineInfo | None]
    """Return the description from the answers of ``info_paths`` in order, an empty object for one that failed;
    ``None`` where they are not enough."""

    # Requests.
    rewrite_chat: RewriteChat
    prompt_error_field: Callable[[int, Mapping[str, Any]], str | None]
    """Return the request field that an error answer (status, decoded body) is about, ``None`` if unknown."""
    refused_fields: tuple[str, ...]
    """Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""
    request_id_header: str = "x-request-id"
    divergent_fields: Mapping[str, bool | None]
    """Fields that the prompt model (vLLM's) covers and this engine treats differently -> the value under which both
    agree."""
    normalizes_messages: bool
    """Whether the engine rewrites tool calls, tool results and a final assistant turn by rules of its own."""

    # Capabilities.
    learns_image_identity: bool
    """Image identities are sentinels in the token ids, derived from pixels; routers learn or compute them. Otherwise
    the router names each image."""
    asks_encoders_itself: bool
    """Language engines send images to encoders themselves. Otherwise the router runs the encoder stage."""
    pairs_prefill_and_decode: bool
    """Prefill and decode engines serve a request together or not at all. Otherwise each also answers alone."""
    publishing_roles: frozenset["Role"]
    """Roles whose engines publish KV events for what they compute."""
