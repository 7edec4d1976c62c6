"""What a deployment hands over, from its resource and this pod's place."""

import logging
from collections.abc import Callable, Sequence

from mmrouter_lib.api import quantity_bytes
from mmrouter_router.core.settings import Settings
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.handover.files import Folder
from mmrouter_router.handover.handover import HandOver
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.handover")


def handover_of(
    settings: Settings, fleet: Fleet, upstream: Upstream, metrics: Metrics, renderers: Callable[[], Sequence[Member]]
) -> HandOver | None:
    """Return what hands images over, ``None`` without ``routing.transfer``, where they go by bytes."""
    spec = settings.deployment.spec
    if spec.routing.transfer == "none":
        return None
    return HandOver(
        settings.deployment,
        fleet,
        upstream,
        settings.engine_key,
        metrics,
        renderers,
        node=settings.node,
        folder=_folder(settings),
        always=settings.always_hand_over,
    )


def _folder(settings: Settings) -> Folder | None:
    if settings.shared_dir is None:
        return None
    pools = (pool for pool in settings.deployment.spec.pools if pool.shared_memory.scope == "node")
    total = max((quantity_bytes(pool.shared_memory.size) for pool in pools), default=0)
    try:
        return Folder(settings.shared_dir, settings.router_id, settings.shared_limit_bytes or total, total)
    except OSError as error:
        log.warning("images are not handed over as files: %s: %s", settings.shared_dir, error.strerror)
        return None
