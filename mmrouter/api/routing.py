"""`spec.routing`: how a request finds its engine, and which media the routers take."""

import ipaddress
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from mmrouter.api.base import Decimal, Resource, Size, broken

_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*", re.IGNORECASE)
_LINK_LOCAL = (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/10"))


def _host(value: str) -> str:
    try:
        ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        if not _HOST.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a host: write a name, `*.` and a domain, or an address, without scheme, port or path"
            ) from None
    return value.lower()


def _cidr(value: str) -> str:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is not a CIDR block: {error}") from None
    for blocked in _LINK_LOCAL:
        if network.version == blocked.version and network.subnet_of(blocked):  # type: ignore[arg-type]
            raise ValueError(f"{value!r} is link-local: such addresses are never fetched")
    return value


Host = Annotated[str, Field(min_length=1, max_length=253), AfterValidator(_host)]
Cidr = Annotated[str, Field(min_length=1, max_length=49), AfterValidator(_cidr)]


class Media(Resource):
    """Which images are taken, and from where. Only routers fetch; engines always get the bytes."""

    fetch: Literal["dataOnly", "allowList", "public"] = "dataOnly"
    """dataOnly: only `data:` URIs. allowList: also http(s) URLs of a host in allowedHosts. public: any public host."""
    allowed_hosts: list[Host] = Field(default=[], max_length=64)
    """Hosts that allowList fetches from, on any port: names, addresses, or `*.example.com` for names below a domain.
    They never unlock private addresses."""
    allowed_cidrs: list[Cidr] = Field(default=[], max_length=64, alias="allowedCIDRs")
    """Private address ranges that may be fetched from all the same, on any port. With allowList the host must be in
    allowedHosts besides. Link-local addresses are never fetched from."""
    max_bytes: Size = "20Mi"
    """Largest encoded image."""
    max_request_bytes: Size = "64Mi"
    """Largest request body."""
    max_pixels: Annotated[int, Field(ge=1, le=10_000_000_000)] = 64_000_000
    """Largest image, width times height."""
    max_images: Annotated[int, Field(ge=0, le=1000)] = 32
    """Most images in one request."""

    @model_validator(mode="after")
    def _reachable(self) -> "Media":
        if self.fetch == "allowList" and not self.allowed_hosts:
            raise broken("allowedHosts", "fetch: allowList needs at least one entry in allowedHosts")
        if self.fetch == "dataOnly" and (self.allowed_hosts or self.allowed_cidrs):
            field = "allowedHosts" if self.allowed_hosts else "allowedCIDRs"
            raise broken(field, f"{field} has no effect with fetch: dataOnly; set fetch to allowList or public")
        return self


class Routing(Resource):
    """How a request finds its engine."""

    policy: Literal["kv", "leastLoaded", "roundRobin", "consistentHash"] = "kv"
    """kv: cached blocks against load. leastLoaded, roundRobin: no cache. consistentHash: by the prompt's beginning."""
    overlap_weight: Decimal = "1.0"
    """Weight of cached blocks against load in policy kv; "0" ignores the cache."""
    encoder_scheduling: Literal["auto", "perImage", "perRequest"] = "auto"
    """auto: earliest estimated finish by measured rates. perImage, perRequest: by the pools' weights."""
    transfer: Literal["none", "shm", "nixl"] = "none"
    """Hand processed tensors to engines: shm on one node, nixl across nodes; none: engines process images."""
    media: Media = Media()
    """Which images are taken, and from where."""
