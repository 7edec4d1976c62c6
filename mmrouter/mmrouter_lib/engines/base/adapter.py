"""The interface of an engine adapter: what routers and sidecars use of one engine type; and what the adapters share.

Adapters do not import the resource's models, so the sidecar's serving process starts without pydantic. Command lines
are in :mod:`mmrouter_lib.engines.launchers`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from mmrouter_lib.engines.base.answer_takeover import AnswerTraits, TokenContinuation
from mmrouter_lib.engines.base.events import Batch
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, RESPONSES, Endpoint, RequestFields

if TYPE_CHECKING:
    from mmrouter_lib.api import EngineType, Role


class EngineInfo(msgspec.Struct, frozen=True):
    """The answers of an engine's information endpoints, as far as routing depends on them."""

    version: str  # release of the engine, empty where it does not report one
    facts: dict[str, str] = {}
    """Settings that an image's identity depends on: name -> text, JSON but for ``version`` and ``model_type``."""
    block_size: int | None = None  # tokens per block of the events, None where the answers do not have it
    device: str = ""  # PyTorch's type of the device that the engine computes on, empty where it reports none
    devices: int = 0  # number of these devices, 0 where the engine reports none
    publishes: bool = True  # whether the engine says nothing against publishing KV events


MODELS_PATH = "/v1/models"


def context_length(models: Mapping[str, Any]) -> int:
    """Return the tokens that the first model of an engine's model list takes, 0 where the list does not say."""
    rows = models.get("data")
    first = rows[0] if isinstance(rows, list) and rows else None
    length = first.get("max_model_len") if isinstance(first, dict) else None
    return length if isinstance(length, int) and length > 0 else 0


MAX_ADAPTERS, MAX_NAME = 256, 256


def lora_adapters(models: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the LoRA adapters in an engine's model list, sorted: the entries with another model as their parent."""
    rows = models.get("data")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    names = {row.get("id") for row in rows if isinstance(row.get("parent"), str)}
    return tuple(sorted(name for name in names if isinstance(name, str) and 0 < len(name) <= MAX_NAME))[:MAX_ADAPTERS]


LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
"""Regular expression for a sample's labels, one group: the text between the braces."""

_FIELDS = ("running", "waiting", "kv_usage")


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank: requests running, requests waiting, share of KV blocks in use (0..1)."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0


def load_parser(
    names: Mapping[str, str],
    rank_label: str,
    combine: Callable[[float, float], float],
    skip: re.Pattern[str] | None = None,
) -> Callable[[str], dict[int, RankLoad]]:
    """Return a function from the text of ``/metrics`` to data parallel rank -> load, empty without any of the gauges.

    ``names``: field of :class:`RankLoad` -> metric name. ``combine`` merges two samples of one rank, starting from 0.
    Samples whose labels match ``skip`` are left out.
    """
    fields = {names[field]: field for field in _FIELDS}
    sample = re.compile(rf"^({'|'.join(map(re.escape, fields))})(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)
    rank_of = re.compile(rf'(?:^|,)\s*{rank_label}="(\d+)"')

    def parse(metrics_text: str) -> dict[int, RankLoad]:
        ranks: dict[int, dict[str, float]] = {}
        for name, labels, text in sample.findall(metrics_text):
            value = finite_number(text)
            if value is None or (skip is not None and skip.search(labels)):
                continue
            rank = rank_of.search(labels)
            values = ranks.setdefault(int(rank[1]) if rank else 0, {})
            values[fields[name]] = combine(values.get(fields[name], 0.0), value)
        return {rank: RankLoad(**values) for rank, values in sorted(ranks.items())}

    return parse


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens since an engine started: of prompts that it looked up in its cache, found there, and generated."""

    prompt: float = 0.0
    cached: float = 0.0
    generated: float = 0.0


def token_parser(names: Mapping[str, str]) -> Callable[[str], TokenCounts | None]:
    """Return a function from the text of ``/metrics`` to the sums over all samples, ``None`` without any of them.

    ``names``: quantity -> metric name, among others ``prefix_queries``, ``prefix_hits`` and ``generated``.
    """
    quantities = [names[quantity] for quantity in ("prefix_queries", "prefix_hits", "generated")]
    sample = re.compile(rf"^({'|'.join(map(re.escape, quantities))})(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)

    def parse(metrics_text: str) -> TokenCounts | None:
        sums = dict.fromkeys(quantities, 0.0)
        samples = [
            (name, value)
            for name, _, text in sample.findall(metrics_text)
            if (value := finite_number(text)) is not None
        ]
        for name, value in samples:
            sums[name] += value
        return TokenCounts(*sums.values()) if samples else None

    return parse


def finite_number(text: str) -> float | None:
    """Return the number that a sample's text is, ``None`` for anything else, NaN and infinities."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class ImageRewrite:
    """The new content of ``messages[message].content[part]``: bytes as a ``data:`` URI, identity as text.

    A video or audio has its bytes already, and only gets its identity.
    """

    message: int
    part: int
    url: str
    uuid: str


@dataclass(slots=True)
class Rewritten:
    """The body for the engine, and the names of the fields that were removed (a bounded set, fit for a label)."""

    body: dict[str, Any]
    removed: tuple[str, ...]


Removed: TypeAlias = dict[str, None]  # names of removed fields, in order
PartRewriter: TypeAlias = Callable[[dict[str, Any], ImageRewrite | None, Removed], dict[str, Any]]
"""Returns a content part for the engine, with the image that belongs there; adds what it removes."""


def without(value: dict[str, Any], names: Sequence[str], prefix: str, removed: Removed) -> dict[str, Any]:
    """Return ``value`` without some fields; ``prefix`` stands before their names in ``removed``."""
    present = [name for name in names if name in value]
    if not present:
        return value
    removed.update((prefix + name, None) for name in present)
    return {name: item for name, item in value.items() if name not in present}


def error_of(body: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return message and ``param`` of an answer's error, which is nested under ``error`` or the body itself."""
    error = body["error"] if isinstance(body.get("error"), Mapping) else body
    message, param = error.get("message"), error.get("param")
    return message if isinstance(message, str) else "", param if isinstance(param, str) and param else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAdapter:
    """One engine type: its functions, its tables, and the capabilities that routers and operator branch on."""

    type: "EngineType"
    health_path: str

    # Events, metrics and information endpoints.
    decode_batch: Callable[[bytes], Batch]  # decode one message of the event stream. Raises EventError.
    metrics: Mapping[str, str]  # quantity (running, waiting, kv_usage ...) -> metric name
    parse_load: Callable[[str], dict[int, RankLoad]]  # return data parallel rank -> load from the text of /metrics
    parse_tokens: Callable[[str], TokenCounts | None]  # return sums over ranks from the text of /metrics
    parse_block_size: Callable[[str], int | None]
    """Return tokens per block from the text of ``/metrics``, ``None`` where it is not there."""
    shows_cpu: Callable[[str], bool] = lambda metrics_text: False
    """Return whether the text of ``/metrics`` proves that the engine computes on a CPU, if no flag sets the size of its
    KV cache."""
    info_paths: tuple[str, ...]  # endpoints that describe the engine; each answers a JSON object
    parse_info: Callable[[Sequence[Mapping[str, Any]]], EngineInfo | None]
    """Return the description from the answers of ``info_paths`` in order, an empty object for one that failed;
    ``None`` where they are not enough."""

    # Requests.
    rewrite_part: PartRewriter
    prompt_error_field: Callable[[int, Mapping[str, Any]], str | None]
    """Return the request field that an error answer (status, decoded body) is about, ``None`` if unknown."""
    request_fields: Mapping[Endpoint, RequestFields]
    removed_fields: tuple[str, ...]
    """Body fields that steer caches, transfers or other tenants' requests; only the router sets them."""
    removed_xargs: tuple[str, ...] = ()
    """Keys of ``vllm_xargs``. A report of reused blocks looks like new copies
    (docs/engine-facts/vllm.md#what-publishes-no-events)."""
    adapter_fields: Callable[[str, str], Mapping[str, str]]
    """Return the fields of a request for a LoRA adapter, from the deployment's served name and the adapter's."""
    adapter_endpoints: frozenset[Endpoint] = frozenset({CHAT, COMPLETIONS, RESPONSES})
    """Endpoints whose requests the engine answers with the adapter that they name."""
    names_adapters: Callable[[str], bool] = lambda release: True
    """Return whether a release's events name the adapter of a block; without the name it looks like the model's."""
    hidden_groups: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
    """Return the kinds of a model's layers whose evictions are in no event, from its config.json."""
    drafter: Callable[[Sequence[str]], str] = lambda args: ""
    """Return what the drafter that an engine's arguments start does to hits; empty where there is none."""
    drafter_sees_last: Callable[[str], bool] = lambda release: True
    """Return whether, in a release, the block that is computed anew for a drafter may be that of a prompt's last token,
    where the engine has several cache groups."""
    other_prompt: Callable[[str, Mapping[str, Any]], str] = lambda release, body: ""
    """Return the field of a request's body of which a release makes another prompt than is predicted, or empty."""
    salted_routes: frozenset[str]
    """Passed routes whose request takes a tenant's salt."""
    request_id_header: str = "x-request-id"
    continues_with_generation_prompt: bool
    """Whether a continued final message follows the generation prompt, so that ``add_generation_prompt`` has no effect.
    Otherwise the two exclude each other."""

    # Capabilities.
    learns_image_identity: bool
    """Image identities are sentinels in the token ids, derived from pixels; routers learn or compute them. Otherwise
    the router names each image."""
    asks_encoders_itself: bool
    """Language engines send images to encoders themselves. Otherwise the router runs the encoder stage."""
    pairs_prefill_and_decode: bool
    """Prefill and decode engines serve a request together or not at all. Otherwise each also answers alone."""
    answer_traits: Callable[[Sequence[Sequence[str]], Mapping[str, Any]], AnswerTraits]
    """Return the traits of a deployment from the engine arguments of each pool and the model's config.json."""
    stores_responses: Callable[[Sequence[str], Mapping[str, str], int], bool]
    """Return whether an engine with these arguments, environment variables and data parallel ranks stores the responses
    of ``/v1/responses`` in one place, so that each is found again."""
    response_query: frozenset[str] = frozenset()
    """Parameters of the query by which a stored response is retrieved."""
    continuation: TokenContinuation | None = None
    """How the engine continues an answer from its token ids; ``None``: it does not (docs/streams.md)."""
    publishing_roles: frozenset["Role"]  # roles whose engines publish KV events for what they compute

    def rewrite_chat(
        self,
        body: Mapping[str, Any],
        images: Sequence[ImageRewrite],
        *,
        model: str,
        cache_salt: str | None,
        adapter: str = "",
    ) -> Rewritten:
        """Return the body that the engine gets; ``body`` stays as it is, and unchanged values are shared with it.

        ``adapter``: the LoRA adapter that is to answer. Images become ``data:`` URIs of the bytes that were hashed.
        Raises ``ValueError`` when an image names a part that does not exist.
        """
        new = dict(body)
        removed: Removed = dict.fromkeys(name for name in self.removed_fields if new.pop(name, None) is not None)
        new |= self.adapter_fields(model, adapter) if adapter else {"model": model}
        if cache_salt is not None:
            new["cache_salt"] = cache_salt
        by_place = {(image.message, image.part): image for image in images}

        def rewritten(number: int, message: Any) -> Any:
            content = message.get("content") if isinstance(message, dict) else None
            if not isinstance(content, list):
                return message
            parts = []
            for place, part in enumerate(content):
                image = by_place.pop((number, place), None)
                if image is not None and not isinstance(part, dict):
                    raise ValueError(f"messages[{number}].content[{place}] is not an object")
                parts.append(self.rewrite_part(part, image, removed) if isinstance(part, dict) else part)
            return {**message, "content": parts}

        messages = new.get("messages")
        if isinstance(messages, list):
            new["messages"] = [rewritten(number, message) for number, message in enumerate(messages)]
        if by_place:
            message, part = next(iter(by_place))
            raise ValueError(f"messages[{message}].content[{part}] does not exist")
        if isinstance(xargs := new.get("vllm_xargs"), dict):
            new["vllm_xargs"] = without(xargs, self.removed_xargs, "vllm_xargs.", removed)
        return Rewritten(new, tuple(removed))
