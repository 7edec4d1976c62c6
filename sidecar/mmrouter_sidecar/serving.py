"""The process that serves: from settings to SIGTERM."""

import asyncio
import logging
import signal

import uvloop

from mmrouter_sidecar.app import Sidecar
from mmrouter_sidecar.settings import Settings, SettingsError, from_json

WRONG = 2  # exit status: the configuration is wrong


async def _serve(settings: Settings) -> None:
    sidecar = Sidecar(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    await sidecar.run()


def serve(told: bytes) -> int:
    """Run by the settings that :mod:`mmrouter_sidecar.reading` printed. Returns the exit status."""
    try:
        uvloop.run(_serve(from_json(told)))
    except SettingsError as error:
        logging.getLogger("mmrouter.sidecar").error("configuration: %s", error)
        return WRONG
    return 0
