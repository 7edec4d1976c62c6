"""Rotation of the feed's keys in three changes of the Secret. Pure.

Pods see a change at different times, so any two of them work with the Secret before and after it. With old keys ``r``
of the routers and ``s`` of the sidecars, and new ones ``R`` and ``S`` (preferred keys first):

| step | routers use | sidecars accept | sidecars have | routers expect |
|---|---|---|---|---|
| | r | r | s | s |
| introduce | R r | R r | s | s S |
| switch | R | R | S | S s |
| retire | R | R | S | S |
"""

from dataclasses import replace
from typing import Final, Literal

import zmq

from mmrouter_lib.feed_keys import fingerprint
from mmrouter_operator.model.credentials import SecretData, rotation_origin

Step = Literal["introduce", "switch", "retire"]
LAST: Final[Step] = "retire"


def next_step(secrets: SecretData) -> tuple[Step, SecretData]:
    """Return the step that follows the state of a Secret, and the Secret after it; the last one ends a rotation."""
    routers, sidecars = secrets.router_secret.split(), secrets.sidecar_secret.split()
    if len(routers) > 1:
        new_sidecar = sidecars[-1]
        return "switch", replace(
            secrets,
            router_secret=routers[0],
            router_public=secrets.router_public.split()[0],
            sidecar_secret=new_sidecar,
            sidecar_public="\n".join(reversed(secrets.sidecar_public.split())),
        )
    if len(expected := secrets.sidecar_public.split()) > 1:
        return "retire", replace(secrets, sidecar_public=expected[0])
    router, sidecar = ([half.decode() for half in zmq.curve_keypair()] for _ in range(2))
    return "introduce", replace(
        secrets,
        router_public=f"{router[0]}\n{secrets.router_public}",
        router_secret=f"{router[1]}\n{secrets.router_secret}",
        sidecar_public=f"{secrets.sidecar_public}\n{sidecar[0]}",
        sidecar_secret=f"{secrets.sidecar_secret}\n{sidecar[1]}",
        rotated=rotation_origin(secrets),
    )


def router_fingerprints(secrets: SecretData) -> list[str]:
    """Return what routers with this Secret report as ``feed_keys``."""
    return sorted({fingerprint(key.encode()) for key in f"{secrets.router_public} {secrets.sidecar_public}".split()})


def sidecar_fingerprints(secrets: SecretData) -> list[str]:
    """Return what sidecars with this Secret report: their own key, and those of the routers that they accept."""
    own = secrets.sidecar_public.split()[0].encode()
    return [fingerprint(key) for key in (own, *secrets.router_public.encode().split())]
