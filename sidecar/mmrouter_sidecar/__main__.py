"""``mmrouter sidecar``: one process beside one engine; configuration comes from files and environment only."""

import asyncio
import logging
import signal
import sys

import uvloop

from mmrouter.api import SpecError
from mmrouter_sidecar.app import Sidecar
from mmrouter_sidecar.settings import SettingsError, load


async def _serve() -> None:
    sidecar = Sidecar(load())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    await sidecar.run()


def main() -> None:
    """Run until SIGTERM. Exit status 2: the configuration is wrong, and the last line says what."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(_serve())
    except (SettingsError, SpecError) as error:
        logging.getLogger("mmrouter.sidecar").error("configuration: %s", error)
        sys.exit(2)


if __name__ == "__main__":
    main()
