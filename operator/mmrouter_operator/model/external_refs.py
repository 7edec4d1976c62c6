"""What a resource names and does not own: objects that must exist before its pods can start. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.refs import KINDS, Ref

Reference = tuple[Ref, str]
"""An object, and the field that names it."""

_VOLUMES: Mapping[str, tuple[str, str]] = {
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
    "configMap": ("ConfigMap", "name"),
    "secret": ("Secret", "secretName"),
}
"""Volume source -> kind that it names, and in which field."""

KINDS_NAMED = frozenset(
    {
        "ConfigMap",
        "PersistentVolumeClaim",
        "PriorityClass",
        "ResourceClaim",
        "ResourceClaimTemplate",
        "RuntimeClass",
        "Secret",
        "ServiceAccount",
    }
)
"""Every kind that :func:`references` can return."""


def references(dep: MMRouterDeployment) -> tuple[Reference, ...]:
    """Return every object that must exist, once, with the first field that names it, in the order of the spec.

    References that Kubernetes itself takes as optional are left out, and so are names that are no texts: a malformed
    ``podTemplate`` is the renderer's to refuse.
    """
    found: dict[Ref, str] = {}
    for kind, name, path in _all(dep):
        if isinstance(name, str) and name:
            row = KINDS[kind]
            namespace = dep.metadata.namespace if row.namespaced else ""
            found.setdefault(Ref(row.api_version, kind, namespace, name), path)
    return tuple(found.items())


def _all(dep: MMRouterDeployment) -> Iterator[tuple[str, Any, str]]:
    spec = dep.spec
    if spec.model.volume is not None:
        yield from _volume(spec.model.volume, "spec.model.volume")
    if spec.model.token_secret is not None:
        yield "Secret", spec.model.token_secret.name, "spec.model.tokenSecret.name"
    if spec.engine.chat_template is not None:
        yield "ConfigMap", spec.engine.chat_template.config_map.name, "spec.engine.chatTemplate.configMap.name"
    if spec.frontend.api_keys is not None:
        yield "Secret", spec.frontend.api_keys.secret.name, "spec.frontend.apiKeys.secret.name"
    yield from _template(spec.frontend.pod_template, "spec.frontend.podTemplate")
    for number, pool in enumerate(spec.pools):
        path = f"spec.pools[{number}]"
        for position, claim in enumerate(pool.accelerator.claims):
            at = f"{path}.accelerator.claims[{position}]"
            yield "ResourceClaim", claim.resource_claim_name, f"{at}.resourceClaimName"
            yield "ResourceClaimTemplate", claim.resource_claim_template_name, f"{at}.resourceClaimTemplateName"
        yield from _template(pool.pod_template, f"{path}.podTemplate")


def _template(template: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    pod = _map(template.get("spec"))
    path += ".spec"
    yield "RuntimeClass", pod.get("runtimeClassName"), f"{path}.runtimeClassName"
    yield "PriorityClass", pod.get("priorityClassName"), f"{path}.priorityClassName"
    yield "ServiceAccount", pod.get("serviceAccountName"), f"{path}.serviceAccountName"
    for number, item in enumerate(_list(pod.get("imagePullSecrets"))):
        yield "Secret", item.get("name"), f"{path}.imagePullSecrets[{number}].name"
    for number, volume in enumerate(_list(pod.get("volumes"))):
        yield from _volume(volume, f"{path}.volumes[{number}]")
    for number, claim in enumerate(_list(pod.get("resourceClaims"))):
        at = f"{path}.resourceClaims[{number}]"
        yield "ResourceClaim", claim.get("resourceClaimName"), f"{at}.resourceClaimName"
        yield "ResourceClaimTemplate", claim.get("resourceClaimTemplateName"), f"{at}.resourceClaimTemplateName"
    for group in ("initContainers", "containers"):
        for number, container in enumerate(_list(pod.get(group))):
            yield from _environment(container, f"{path}.{group}[{number}]")


def _volume(volume: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    for source, (kind, field) in _VOLUMES.items():
        said = _map(volume.get(source))
        if said and said.get("optional") is not True:
            yield kind, said.get(field), f"{path}.{source}.{field}"
    for number, part in enumerate(_list(_map(volume.get("projected")).get("sources"))):
        for source, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            said = _map(part.get(source))
            if said and said.get("optional") is not True:
                yield kind, said.get("name"), f"{path}.projected.sources[{number}].{source}.name"


def _environment(container: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    for number, item in enumerate(_list(container.get("env"))):
        for source, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
            said = _map(_map(item.get("valueFrom")).get(source))
            if said and said.get("optional") is not True:
                yield kind, said.get("name"), f"{path}.env[{number}].valueFrom.{source}.name"
    for number, item in enumerate(_list(container.get("envFrom"))):
        for source, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
            said = _map(item.get(source))
            if said and said.get("optional") is not True:
                yield kind, said.get("name"), f"{path}.envFrom[{number}].{source}.name"


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
