"""The operator's site settings: one typed YAML file. Every field has a default, so the file may be absent."""

import ipaddress
import json
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

import mmrouter_lib as mmrouter

Cidr = Annotated[str, AfterValidator(lambda value: str(ipaddress.ip_network(value)))]
"""An address range, `10.0.0.0/8` or `fd00::/8`, in its canonical form."""


class OperatorConfig(BaseModel):
    """Site settings: camelCase in the file, snake_case here."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
    )

    image: str = f"mmrouter/mmrouter:{mmrouter.__version__}"
    """Image of router and sidecar."""
    engine_images: dict[str, str] = Field(default={})
    """``<engine>/<accelerator kind>`` -> image, over the built-in table (``vllm/nvidia: registry.example/vllm:1``)."""
    hub_endpoint: str = ""
    """URL of a mirror of the model hub, for engines and frontends; empty for the hub itself."""
    shared_memory_root: str = Field(default="/dev/shm/mmrouter", pattern=r"^(/[A-Za-z0-9][-A-Za-z0-9._]*)+$")  # noqa: S108 - a folder on the nodes, whose maker and owner is the site
    """Folder on the nodes' tmpfs below which pools with ``sharedMemory.scope: node`` have their directories."""
    prometheus_address: str = ""
    """URL of a Prometheus, which KEDA's triggers ask; empty where there is none."""
    pod_cidrs: tuple[Cidr, ...] = ()
    """The cluster's pod and service ranges, kept out of the frontend's egress to public hosts."""
    api_server_cidrs: tuple[Cidr, ...] = ()
    """Addresses of the API server behind its Service, the only ones that a frontend's NetworkPolicy then opens 443 and
    6443 to; empty opens these ports to everywhere, because no object in a namespace shows the addresses."""


class ConfigError(ValueError):
    """The operator's file is malformed; the message names the field."""


def load_config(path: Path | None) -> OperatorConfig:
    """Read the file; ``None`` gives the defaults. Raises :class:`ConfigError` or ``OSError``."""
    if path is None:
        return OperatorConfig()
    try:
        content: Any = yaml.safe_load(path.read_text())
        # JSON mode: a YAML list is a tuple here.
        return OperatorConfig.model_validate_json(json.dumps(content or {}))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{path}: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from error
