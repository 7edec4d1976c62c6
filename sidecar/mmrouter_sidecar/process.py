"""The process that serves: from settings to SIGTERM."""

import asyncio
import gc
import logging
import signal

import uvloop

from mmrouter_sidecar.app import Sidecar
from mmrouter_sidecar.settings import Settings, SettingsError, from_json

WRONG = 2  # exit status: the configuration is wrong


YOUNG = 10_000
"""Objects made and not gone again after which the collector looks for cycles, of which an engine's events make none."""


async def _serve(settings: Settings) -> None:
    sidecar = Sidecar(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    gc.freeze()  # what lives from here on lives for good: no collection needs to look at it again
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
    await sidecar.run()


def serve(told: bytes) -> int:
    """Run by the settings that :mod:`mmrouter_sidecar.settings_loader` printed. Returns the exit status."""
    try:
        uvloop.run(_serve(from_json(told)))
    except SettingsError as error:
        logging.getLogger("mmrouter.sidecar").error("configuration: %s", error)
        return WRONG
    return 0
