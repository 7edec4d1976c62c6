"""Labels, annotations and readiness gates that the operator writes and reads."""

from typing import Final

CHILD_SELECTOR: Final = "app.kubernetes.io/managed-by=mmrouter-operator"
"""Label selector of every child."""

DEPLOYMENT_LABEL: Final = "mmrouter.io/deployment"
POOL_LABEL: Final = "mmrouter.io/pool"
ROLE_LABEL: Final = "mmrouter.io/role"
FRONTEND_ROLE: Final = "frontend"

COMPATIBILITY: Final = "mmrouter.io/compatibility"
"""Label of engine pods; engines with equal values can read each other's KV blocks."""
KV_LAYOUT: Final = "mmrouter.io/kv-layout"
"""Label of prefill and decode pods when their layouts differ within a deployment; only equal ones are paired."""
SHARED_MEMORY: Final = "mmrouter.io/shared-memory"
"""Label of engine pods that share their node's tmpfs directory; its value is the scope. Frontends are placed near these
pods and do not have the label: they should not attract each other."""

INPUTS_HASH: Final = "mmrouter.io/template-hash"
"""Annotation of pod templates: the hash of their inputs (:mod:`mmrouter_operator.render.pod.template_hashes`)."""
RENDERING_HASH: Final = "mmrouter.io/rendering-hash"
"""Annotation of pod templates: the hash of their content, set when one is chosen
(:mod:`mmrouter_operator.planning.template_revisions`)."""
SET_TARGET: Final = "mmrouter.io/set-target"
"""Annotation of a set pool's Deployment: replicas that an autoscaled pool had when its set began to switch."""
ADOPT: Final = "mmrouter.io/adopt"
"""Annotation of the resource: ``"true"``, or the operator version whose rendering may replace the stored one."""

ROUTABLE: Final = "mmrouter.io/routable"
"""Readiness gate: the frontends can route to the pod."""
VERIFIED: Final = "mmrouter.io/verified"
"""Readiness gate: the engine's block hashes were proved to be those that the router predicts."""
GATES: Final = (ROUTABLE, VERIFIED)
"""Readiness gates of engine pods, for every role (docs/architecture.md). Pods keep the list they were created with."""
