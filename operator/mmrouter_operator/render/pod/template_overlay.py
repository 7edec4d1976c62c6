"""A user's `podTemplate` over a rendered pod template, and what we cannot do without put back. Pure.

Types are checked by the Kubernetes client's own models. A field that they do not know may be of a newer Kubernetes, so
it passes: only what can be no such object in any version is refused, and everything after this may rely on the types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mmrouter_lib.api import SpecError
from mmrouter_operator.render.pod.strategic_merge import MERGE_KEYS, OverlayError, described, overlay

OWNED_VOLUMES: Final = frozenset(
    {"config", "engine-config", "api-keys", "client-tls", "engine-certificate", "engine-tls"}
    | {"state", "shared", "plugin"}
)
"""Volumes that hold our configuration, secrets and journal. Others (hub, shm, tmp) may be of the user's choice."""
OWNED_ENV_PREFIXES: Final = ("POD_", "MMROUTER_")
OWNED_ENV: Final = frozenset({"NODE_NAME", "VLLM_API_KEY", "SGLANG_API_KEY", "PYTHONPATH"})
"""PYTHONPATH only where we set it, for our plugin."""
OUR_IMAGES: Final = frozenset(
    {"sidecar", "router", "shared-memory", "model-metadata", "handover-plugin", "engine-certificate"}
)
"""Containers that run our own image, whose command is therefore ours too."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FinishedTemplate:
    """A pod template as it is applied; ``restored``: the places where the user's patch has no effect."""

    template: dict[str, Any]
    restored: tuple[str, ...] = ()


def finish(template: dict[str, Any], patch: dict[str, Any], path: str) -> FinishedTemplate:
    """Return a pod template with the user's patch over it; ``path`` is the patch's field in the resource.

    Put back are our labels and annotations, readiness gates, the ports that others reach us by, what probes ask, and
    the volumes and variables that hold our configuration. Our variables come first again, because ``$(VAR)`` sees only
    what stands before it. Raises ``SpecError`` for a malformed patch, for one after which anything has a
    wrong type, and for one that takes a container of ours away.
    """
    if not patch:
        return FinishedTemplate(template)
    try:
        merged = overlay(template, patch)
    except OverlayError as error:
        raise SpecError([(f"{path}.{error.path}" if error.path else path, str(error))]) from error
    if faults := template_faults(merged):
        raise SpecError([(f"{path}.{place}", sentence) for place, sentence in faults])
    report: list[str] = []
    metadata, spec = merged.setdefault("metadata", {}), merged.setdefault("spec", {})
    for kind in ("labels", "annotations"):
        ours = template["metadata"][kind]
        theirs = metadata.setdefault(kind, {})
        for name in ours:
            if theirs.get(name) != ours[name]:
                report.append(f"metadata.{kind}.{name}")
        theirs.update(ours)
    _restore(spec, template["spec"], "readinessGates", "conditionType", "spec", report)
    _restore(spec, template["spec"], "volumes", "name", "spec", report, lambda item: item["name"] in OWNED_VOLUMES)
    for kind in ("initContainers", "containers"):
        patched = {container.get("name"): container for container in spec.get(kind) or []}
        for container in template["spec"].get(kind, []):
            name = container["name"]
            if name not in patched:
                raise SpecError([(f"{path}.spec.{kind}", f"container `{name}` cannot be removed")])
            _container(patched[name], container, f"spec.{kind}[{name}]", report)
    return FinishedTemplate(merged, tuple(f"{path}.{place}" for place in report))


def _container(theirs: Item, ours: Item, place: str, report: list[str]) -> None:
    if ours["name"] in OUR_IMAGES:
        for key in ("command", "args", "restartPolicy"):
            if theirs.get(key) != ours.get(key):
                report.append(f"{place}.{key}")
                theirs.pop(key, None)
                theirs |= {key: ours[key]} if key in ours else {}
    _restore(theirs, ours, "env", "name", place, report, _is_owned_variable)
    _restore(theirs, ours, "ports", "name", place, report)
    _restore(theirs, ours, "volumeMounts", "mountPath", place, report, lambda item: item["name"] in OWNED_VOLUMES)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        mine, asked = ours.get(probe, {}).get("httpGet"), (theirs.get(probe) or {}).get("httpGet")
        if mine is not None and asked is not None and not mine.items() <= asked.items():
            report.append(f"{place}.{probe}.httpGet")
            asked |= mine
    if ours.get("env"):
        places = {item["name"]: place for place, item in enumerate(ours["env"])}
        theirs["env"].sort(key=lambda item: places.get(item["name"], len(places)))


def _restore(
    theirs: Item,
    ours: Item,
    name: str,
    key: str,
    place: str,
    report: list[str],
    owned: Callable[[Item], bool] = lambda item: True,
) -> None:
    """Put our elements of a list back where they were changed or taken away; others stay as they are."""
    wanted = {item[key]: item for item in ours.get(name, []) if owned(item)}
    elements = theirs.get(name) or []
    present = {item.get(key): item for item in elements}
    if lost := [value for value, item in wanted.items() if present.get(value) != item]:
        report += [f"{place}.{name}[{value}]" for value in lost]
        theirs[name] = [*wanted.values(), *(item for item in elements if item.get(key) not in wanted)]


def _is_owned_variable(item: Item) -> bool:
    return item["name"].startswith(OWNED_ENV_PREFIXES) or item["name"] in OWNED_ENV


Location = tuple[int | str, ...]
Fault = tuple[str, str]
"""A place, and a sentence about it."""

_KINDS: Final = {
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""Pydantic's kind of error -> what is wanted."""
_QUANTITY_MAPS: Final = frozenset({"limits", "requests", "overhead"})
_QUANTITIES: Final = (("emptyDir", "sizeLimit"), ("resourceFieldRef", "divisor"))
_TYPES: Final = ("int", "str")
_ZEROES: Final = frozenset({"lun", "priority", "seconds", "value"})
"""Fields that the models want and the API server takes for 0 or empty where they are missing."""


def template_faults(template: Mapping[str, Any]) -> list[Fault]:
    """Return what in a pod template is of a wrong type or misses what it needs; places are within the template."""
    # Half a second and 8 MiB that only a podTemplate costs.
    from kubernetes.aio.client.models.v1_pod_template_spec import V1PodTemplateSpec  # noqa: PLC0415

    return _faults(V1PodTemplateSpec, template)


def volume_faults(source: Mapping[str, Any]) -> list[Fault]:
    """Return the same for a volume source by its name, as in ``model.volume``."""
    from kubernetes.aio.client.models.v1_volume import V1Volume  # noqa: PLC0415

    return _faults(V1Volume, {"name": "model", **source})


def _faults(model: type[BaseModel], value: Mapping[str, Any]) -> list[Fault]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        faults: dict[str, tuple[list[str], Any]] = {}
        for detail in error.errors(include_url=False):
            if _passes(detail):
                continue
            kinds, _ = faults.setdefault(_place(detail["loc"], value), ([], detail["input"]))
            if detail["type"] != "missing":
                kinds.append(_KINDS.get(detail["type"]) or detail["msg"].removeprefix("Input should be "))
        return [
            (place, f"is {' or '.join(kinds)}, not {described(value)}" if kinds else "is required")
            for place, (kinds, value) in faults.items()
        ]
    return []


def _passes(detail: ErrorDetails) -> bool:
    """Whether the API server may take what the models do not."""
    if detail["type"] == "missing":
        return detail["loc"][-1] in _ZEROES
    return detail["type"] == "extra_forbidden" or _is_quantity(detail["loc"], detail["input"])


def _is_quantity(location: Location, value: Any) -> bool:
    """Whether this is a number where Kubernetes takes a quantity, which the models know as text only."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return location[-2:] in _QUANTITIES or location[-2] in _QUANTITY_MAPS


def _place(location: Location, value: Any) -> str:
    """Return a path as a user reads it: elements that have a name by it, because positions are those after merging."""
    path: tuple[str, ...] = ()
    text = ""
    for part in location:
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) else None
            name = value.get(MERGE_KEYS.get(path, "name")) if isinstance(value, dict) else None
            text += f"[{name if isinstance(name, str | int) else part}]"
        elif part in _TYPES and not (isinstance(value, dict) and part in value):
            break  # one of the types that the value could have had
        else:
            value = value.get(part) if isinstance(value, dict) else None
            path = (*path, part)
            text += f".{part}"
    return text.removeprefix(".")
