"""A user's `podTemplate` over a rendered pod template, and what we cannot do without put back. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from mmrouter_lib.api import SpecError
from mmrouter_operator.render.pod.strategic_merge import OverlayError, overlay
from mmrouter_operator.render.pod.template_validation import template_faults

OWNED_VOLUMES: Final = frozenset({"config", "engine-config", "api-keys", "state", "shared", "plugin"})
"""Volumes that hold our configuration, secrets and journal. Others (hub, shm, tmp) may be of the user's choice."""
OWNED_ENV_PREFIXES: Final = ("POD_", "MMROUTER_")
OWNED_ENV: Final = frozenset({"NODE_NAME", "VLLM_API_KEY", "SGLANG_API_KEY", "PYTHONPATH"})
"""PYTHONPATH only where we set it, for our plugin."""
OUR_IMAGES: Final = frozenset({"sidecar", "router", "shared-memory", "model-metadata", "handover-plugin"})
"""Containers that run our own image, whose command is therefore ours too."""

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FinishedTemplate:
    """A pod template as it is applied; ``restored``: the places where the user's patch has no effect."""

    template: dict[str, Any]
    restored: tuple[str, ...] = ()


@dataclass(slots=True)
class _Report:
    path: str
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.places.append(f"{self.path}.{place}")


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
    report = _Report(path)
    metadata, spec = merged.setdefault("metadata", {}), merged.setdefault("spec", {})
    for kind in ("labels", "annotations"):
        ours = template["metadata"][kind]
        theirs = metadata.setdefault(kind, {})
        for name in ours:
            if theirs.get(name) != ours[name]:
                report.add(f"metadata.{kind}.{name}")
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
    return FinishedTemplate(merged, tuple(report.places))


def _container(theirs: Item, ours: Item, place: str, report: _Report) -> None:
    if ours["name"] in OUR_IMAGES:
        for key in ("command", "args", "restartPolicy"):
            if theirs.get(key) != ours.get(key):
                report.add(f"{place}.{key}")
                theirs.pop(key, None)
                theirs |= {key: ours[key]} if key in ours else {}
    _restore(theirs, ours, "env", "name", place, report, lambda item: _owned_variable(item["name"]))
    _restore(theirs, ours, "ports", "name", place, report)
    _restore(theirs, ours, "volumeMounts", "mountPath", place, report, lambda item: item["name"] in OWNED_VOLUMES)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        mine, asked = ours.get(probe, {}).get("httpGet"), (theirs.get(probe) or {}).get("httpGet")
        if mine is not None and asked is not None and not mine.items() <= asked.items():
            report.add(f"{place}.{probe}.httpGet")
            asked |= mine
    if ours.get("env"):
        theirs["env"] = _ours_first([item["name"] for item in ours["env"]], theirs["env"])


def _restore(
    theirs: Item,
    ours: Item,
    name: str,
    key: str,
    place: str,
    report: _Report,
    owned: Callable[[Item], bool] = lambda item: True,
) -> None:
    """Put our elements of a list back where they were changed or taken away; others stay as they are."""
    wanted = {item[key]: item for item in ours.get(name, []) if owned(item)}
    if not wanted:
        return
    found = theirs.get(name) or []
    present = {item.get(key): item for item in found}
    for value, item in wanted.items():
        if present.get(value) != item:
            report.add(f"{place}.{name}[{value}]")
    if any(present.get(value) != item for value, item in wanted.items()):
        theirs[name] = [*wanted.values(), *(item for item in found if item.get(key) not in wanted)]


def _owned_variable(name: str) -> bool:
    return name.startswith(OWNED_ENV_PREFIXES) or name in OWNED_ENV


def _ours_first(names: list[str], env: list[Item]) -> list[Item]:
    by_name = {item["name"]: item for item in env}
    return [by_name[name] for name in names if name in by_name] + [item for item in env if item["name"] not in names]
