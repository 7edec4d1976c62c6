"""Process entry: ``mmrouter router``."""

import gc
import logging
import sys

import uvloop

from mmrouter.api import SpecError
from mmrouter.families import ModelFolderError
from mmrouter_router.app import Router
from mmrouter_router.settings import SettingsError, load


def main() -> int:
    """Run the router until a signal ends it. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        settings = load()
    except (SettingsError, SpecError) as error:
        sys.stderr.write(f"mmrouter router: {error}\n")
        return 2

    async def serve() -> None:
        router = Router(settings)
        # What lives from here on lives for good: no collection needs to look at it again.
        gc.freeze()
        await router.run()

    try:
        uvloop.run(serve())
    except ModelFolderError as error:
        sys.stderr.write(f"mmrouter router: {error}; metadata comes from spec.model.volume or the hub\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
