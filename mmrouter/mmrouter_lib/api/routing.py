"""`spec.routing`: how engines are chosen, and which media the routers accept."""

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from mmrouter_lib.api.cross_field_rules import VALIDATIONS, Resource, rule, validation
from mmrouter_lib.api.engine import Volume
from mmrouter_lib.api.shared_types import Decimal, Size

_LABEL = "[a-zA-Z0-9]([-a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
_HOST = rf"^([*][.])?{_LABEL}([.]{_LABEL})*$"
_CIDR = r"^[0-9a-fA-F:.]{2,45}/(0|[1-9][0-9]{0,2})$"
_LINK_LOCAL = (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/10"))


def _host(value: str) -> str:
    if not re.match(_HOST, value) and not _is_address(value):
        raise ValueError(
            f"{value!r} is not a host: write a name, `*.` and a domain, or an address, without scheme, port or path"
        )
    return value.lower()


def _is_address(value: str) -> bool:
    inner = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    try:
        address = ipaddress.ip_address(inner)
    except ValueError:
        return False
    return "%" not in inner and not _mapped(address)


def _mapped(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether this is an IPv4-mapped IPv6 address, which the API server's checks refuse."""
    return isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None


def _cidr(value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a CIDR block: {error}") from None
    if _mapped(network.network_address):
        raise ValueError(f"{value!r} is not a CIDR block: write an IPv4 range as such")
    for blocked in _LINK_LOCAL:
        if network.version == blocked.version and network.subnet_of(blocked):  # type: ignore[arg-type]
            raise ValueError(f"{value!r} is link-local: such addresses are never fetched")
    return value


_HOST_RULE = validation(
    f"self.matches('{_HOST}') || isIP(self) || "
    "(self.startsWith('[') && self.endsWith(']') && isIP(self.substring(1, size(self) - 1)))",
    "write a name, `*.` and a domain, or an address, without scheme, port or path",
)
_CIDR_RULES = [
    validation(
        "isCIDR(self) && cidr(self) == cidr(self).masked()",
        "this is not a CIDR block: write the first address of the range, `/` and the length of its prefix",
    ),
    validation(
        "!isCIDR(self) || !("
        + " || ".join(f"cidr('{blocked}').containsCIDR(cidr(self))" for blocked in _LINK_LOCAL)
        + ")",
        "the range is link-local: such addresses are never fetched",
    ),
]

Host = Annotated[
    str, Field(min_length=1, max_length=253, json_schema_extra={VALIDATIONS: [_HOST_RULE]}), AfterValidator(_host)
]
Cidr = Annotated[
    str,
    Field(min_length=1, max_length=49, pattern=_CIDR, json_schema_extra={VALIDATIONS: _CIDR_RULES}),
    AfterValidator(_cidr),
]


def _some(field: str) -> str:
    """CEL for: the list has an entry."""
    return f"(has(self.{field}) && size(self.{field}) > 0)"


EncoderScheduling = Literal["auto", "perImage", "perRequest"]


class Media(Resource):
    """Accepted images and their sources. Only routers fetch; engines always get the bytes."""

    fetch: Literal["dataOnly", "allowList", "public"] = "dataOnly"
    """dataOnly: only `data:` URIs. allowList: also http(s) URLs of a host in allowedHosts. public: any public host."""
    allowed_hosts: list[Host] = Field(default=[], max_length=64)
    """Hosts that allowList fetches from, on any port: names, addresses, or `*.example.com` for names below a domain.
    They do not unlock private addresses."""
    allowed_cidrs: list[Cidr] = Field(default=[], max_length=64, alias="allowedCIDRs")
    """Private address ranges that may be fetched from, on any port. With allowList the host must also be in
    allowedHosts. Link-local addresses are never fetched from."""
    max_bytes: Size = "20Mi"
    """Largest encoded image or video."""
    max_request_bytes: Size = "64Mi"
    """Largest request body."""
    max_pixels: Annotated[int, Field(ge=1, le=10_000_000_000)] = 64_000_000
    """Largest image or frame of a video, width times height."""
    max_images: Annotated[int, Field(ge=0, le=1000)] = 32
    """Maximum number of images and other media in one request."""

    @rule("allowedHosts", f"self.fetch != 'allowList' || {_some('allowedHosts')}")
    def _a_list_to_allow(self) -> bool:
        """fetch: allowList needs at least one entry in allowedHosts"""
        return self.fetch != "allowList" or bool(self.allowed_hosts)

    @rule("allowedHosts", f"self.fetch != 'dataOnly' || !{_some('allowedHosts')}")
    def _hosts_matter(self) -> bool:
        """allowedHosts has no effect with fetch: dataOnly; set fetch to allowList or public"""
        return self.fetch != "dataOnly" or not self.allowed_hosts

    @rule("allowedCIDRs", f"self.fetch != 'dataOnly' || !{_some('allowedCIDRs')}")
    def _ranges_matter(self) -> bool:
        """allowedCIDRs has no effect with fetch: dataOnly; set fetch to allowList or public"""
        return self.fetch != "dataOnly" or not self.allowed_cidrs


class Routing(Resource):
    """How engines are chosen for requests."""

    policy: Literal["kv", "leastLoaded", "roundRobin", "consistentHash"] = "kv"
    """kv: cached blocks weighed against load. leastLoaded, roundRobin: ignore caches. consistentHash: by the prompt's
    beginning."""
    overlap_weight: Decimal = "1.0"
    """Weight of cached blocks relative to load in policy kv; "0" ignores caches."""
    encoder_scheduling: EncoderScheduling = "auto"
    """auto: earliest estimated finish, by measured rates. perImage, perRequest: by the pools' weights."""
    min_prefill_tokens: int = Field(default=512, ge=0, le=1 << 20)
    """Tokens that must remain to be computed for a prompt to use a prefill pool. Below it the decode engine computes
    the prompt; above it the measured times of both ways decide. 0: every prompt uses one."""
    max_queued_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Requests of one router that may wait for a first answer byte at one engine, per rank; an unstreamed answer counts
    until it is complete. If all engines that could serve a request are full, it is answered 429 with Retry-After."""
    continue_streams: bool = True
    """Whether a stream whose engine ends or hangs is continued on another one: greedy and seeded answers, and sampled
    chats and completions on vLLM."""
    seed_streams: bool = False
    """Whether sampled streams on vLLM that token ids cannot continue (tools, grammars, stop strings) get a random seed,
    by which they are repeated on another engine. vLLM samples seeded requests one by one, without FlashInfer."""
    transfer: Literal["auto", "none", "shm", "nixl"] | None = None
    """How images reach vLLM engines. Default: auto. none: inside the request. shm: through memory that the pods of a
    node share (every pool needs sharedMemory.scope node): encoded images as files, images processed by a renderer pool
    directly. nixl: processed images over the network, and shm between pods of scope node on one node. auto: as shm,
    where every pool has scope node, and by a renderer only while that is measured to be faster. The fallback is the
    request."""
    shared_volume: Volume | None = None
    """Pod volume source for the memory that pods with sharedMemory.scope node share, such as a `persistentVolumeClaim`
    of a volume of one node; it must not be shared between nodes. Default: a hostPath, which needs a namespace of level
    privileged."""
    media: Media = Media()
    """Accepted images and their sources."""

    @property
    def hand_over_is_optional(self) -> bool:
        """Whether images may travel inside requests wherever a hand-over is not possible."""
        return self.transfer in (None, "auto", "none")
