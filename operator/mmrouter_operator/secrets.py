"""Fresh secrets of a deployment: the only place that makes CURVE keys. Rendering takes the result as a value."""

import secrets as random

import zmq

from mmrouter.identity import KEY_BYTES
from mmrouter_operator.render.secret import SecretData


def new_secret_data() -> SecretData:
    """Return new random keys: one CURVE pair for all sidecars, one for all routers, and two bearer texts."""
    sidecar_public, sidecar_secret = zmq.curve_keypair()
    router_public, router_secret = zmq.curve_keypair()
    return SecretData(
        identity_key=random.token_bytes(KEY_BYTES),
        sidecar_public=sidecar_public.decode(),
        sidecar_secret=sidecar_secret.decode(),
        router_public=router_public.decode(),
        router_secret=router_secret.decode(),
        control_token=random.token_hex(32),
        engine_key=random.token_hex(32),
    )
