"""Objects that a resource refers to and does not own: they must exist before its pods can start. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import Kind, Ref

Reference = tuple[Ref, str]
"""An object, and the field that names it."""

_Sources = Mapping[str, tuple[str, str]]
"""Field with a reference -> the kind that it refers to, and the field of it with the name."""
_VOLUMES: _Sources = {
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
    "configMap": ("ConfigMap", "name"),
    "secret": ("Secret", "secretName"),
}
_PROJECTED: _Sources = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "name")}
_VARIABLES: _Sources = {
    **dict.fromkeys(("secretKeyRef", "secretRef"), ("Secret", "name")),
    **dict.fromkeys(("configMapKeyRef", "configMapRef"), ("ConfigMap", "name")),
}

EXTERNAL_KINDS: Final[Mapping[str, Kind]] = {
    kind.kind: kind
    for kind in (
        Kind("ConfigMap", "v1"),
        Kind("PersistentVolumeClaim", "v1"),
        Kind("PriorityClass", "scheduling.k8s.io/v1"),
        Kind("ResourceClaim", "resource.k8s.io/v1"),
        Kind("ResourceClaimTemplate", "resource.k8s.io/v1"),
        Kind("RuntimeClass", "node.k8s.io/v1"),
        Kind("Secret", "v1"),
        Kind("ServiceAccount", "v1"),
    )
}
"""Every kind that :func:`references` can return."""


def references(dep: MMRouterDeployment) -> tuple[Reference, ...]:
    """Return every object that must exist, once, with the first field that names it, in the order of the spec.

    References that Kubernetes takes as optional are left out, and so are names that are not strings: the renderer
    refuses a malformed ``podTemplate``.
    """
    fields: dict[Ref, str] = {}
    for kind, name, path in _all(dep):
        if isinstance(name, str) and name:
            row = EXTERNAL_KINDS[kind]
            namespace = dep.metadata.namespace if row.namespaced else ""
            fields.setdefault(Ref(row.api, kind, namespace, name), path)
    return tuple(fields.items())


def _all(dep: MMRouterDeployment) -> Iterator[tuple[str, Any, str]]:
    spec = dep.spec
    if spec.model.volume is not None:
        yield from _volume(spec.model.volume, "spec.model.volume")
    if spec.engine.embedding_volume is not None:
        yield from _volume(spec.engine.embedding_volume, "spec.engine.embeddingVolume")
    if spec.routing.shared_volume is not None:
        yield from _volume(spec.routing.shared_volume, "spec.routing.sharedVolume")
    if spec.model.token_secret is not None:
        yield "Secret", spec.model.token_secret.name, "spec.model.tokenSecret.name"
    if spec.engine.chat_template is not None:
        yield "ConfigMap", spec.engine.chat_template.config_map.name, "spec.engine.chatTemplate.configMap.name"
    if spec.engine.tls is not None:
        yield "Secret", spec.engine.tls.secret_name, "spec.engine.tls.secretName"
    if spec.frontend.api_keys is not None:
        yield "Secret", spec.frontend.api_keys.secret.name, "spec.frontend.apiKeys.secret.name"
    if spec.frontend.tls is not None:
        yield "Secret", spec.frontend.tls.secret_name, "spec.frontend.tls.secretName"
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
    yield from _required(volume, _VOLUMES, path)
    for number, part in enumerate(_list(_map(volume.get("projected")).get("sources"))):
        yield from _required(part, _PROJECTED, f"{path}.projected.sources[{number}]")


def _environment(container: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any, str]]:
    for number, item in enumerate(_list(container.get("env"))):
        yield from _required(_map(item.get("valueFrom")), _VARIABLES, f"{path}.env[{number}].valueFrom")
    for number, item in enumerate(_list(container.get("envFrom"))):
        yield from _required(item, _VARIABLES, f"{path}.envFrom[{number}]")


def _required(holder: Mapping[str, Any], sources: _Sources, path: str) -> Iterator[tuple[str, Any, str]]:
    for source, (kind, field) in sources.items():
        reference = _map(holder.get(source))
        if reference and reference.get("optional") is not True:
            yield kind, reference.get(field), f"{path}.{source}.{field}"


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
