"""The weights of encoder pools, which change while routers run: of the mounted resource only they are read again."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from mmrouter_lib.api import MMRouterDeployment, SpecError, load_deployment

CHECK_SECONDS: Final = 1.0
"""A kubelet updates a mounted ConfigMap within about a minute."""

log = logging.getLogger(__name__)


class EncoderWeights:
    """Pool -> weight, by the mounted resource; ``changed`` is called after a change."""

    def __init__(self, file: Path, deployment: MMRouterDeployment, changed: Callable[[], None]) -> None:
        self._file, self._changed = file, changed
        self._weights = _weights(deployment)
        self._seen = b""

    def of(self, pool: str) -> int:
        return self._weights[pool]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.read()

    def read(self) -> None:
        """Read the file if it has changed. One that cannot be read, or lacks a pool, leaves weights as they are."""
        try:
            raw = self._file.read_bytes()
            if raw == self._seen:
                return
            self._seen = raw
            read = _weights(load_deployment(self._file))
        except (OSError, SpecError) as error:
            log.warning("encoders keep their weights: %s", error)
            return
        new = self._weights | {pool: weight for pool, weight in read.items() if pool in self._weights}
        if new != self._weights:
            self._weights = new
            log.info("weights of encoders: %s", ", ".join(f"{pool} {weight}" for pool, weight in new.items()))
            self._changed()


def _weights(deployment: MMRouterDeployment) -> dict[str, int]:
    return {pool.name: pool.weight for pool in deployment.spec.pools if pool.role == "encoder"}
