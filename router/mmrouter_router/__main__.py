"""Process entry: ``mmrouter router``."""

import gc
import logging
import sys
from typing import Final

import uvloop

from mmrouter_lib.api import SpecError
from mmrouter_lib.families import ModelFolderError
from mmrouter_router.app import Router
from mmrouter_router.core.settings import SettingsError, load

YOUNG: Final = 10_000
"""Objects made and not gone again after which the collector looks for cycles. Requests that come together make as many
as that for a moment, and nothing of a request or of a connection is a cycle: with Python's 700 the collector takes a
tenth of all CPU, and everything stands still for milliseconds, to find nothing.
"""


def main() -> int:
    """Run the router until a signal ends it. Returns the exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # three servers tell of every step, and we of the whole
    try:
        settings = load()
    except (SettingsError, SpecError) as error:
        sys.stderr.write(f"mmrouter router: {error}\n")
        return 2

    async def serve() -> None:
        router = Router(settings)
        # What lives from here on lives for good: no collection needs to look at it again.
        gc.freeze()
        gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        await router.run()

    try:
        uvloop.run(serve())
    except ModelFolderError as error:
        sys.stderr.write(f"mmrouter router: {error}; metadata comes from spec.model.volume or the hub\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
