"""The Secret of a deployment. Every container mounts only the entries that it needs (docs/architecture.md)."""

import base64
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata, secret_name

KIND: Final = ChildKind("Secret", "v1", wave=1, guard="removal", local=True, lifecycle="created")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    return [render_secret(inputs.dep, inputs.secrets)]


def render_secret(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, Any]:
    data = {name: base64.b64encode(value).decode() for name, value in sorted(secrets.entries().items())}
    return KIND.manifest(object_metadata(dep, secret_name(dep), "secrets"), type="Opaque", data=data)
