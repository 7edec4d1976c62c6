"""Entry point of the process ``mmrouter router``."""

import gc
import logging
import sys
import warnings
from typing import Final

import uvloop

from mmrouter_lib.api import SpecError
from mmrouter_lib.families import ModelFolderError
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_lib.tls_context import CertificateError
from mmrouter_router.app import Router
from mmrouter_router.core.log_limit import LogLimit
from mmrouter_router.core.settings import load
from mmrouter_router.core.worker_threads import switch_threads_often

GC_THRESHOLD: Final = 10_000  # with Python's 700, collections in a burst of requests take a tenth of the CPU


def shorten_collections() -> None:
    """Exclude the objects made so far from garbage collections, because they live as long as the process."""
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


def main() -> int:
    """Run the router until a signal ends it. Returns the exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
    # Pillow comments on every tag of a damaged image, of which a client chooses thousands.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it logs every step of three servers
    try:
        settings = load()
        logging.getLogger("mmrouter").setLevel(settings.log_level)
    except (SettingsError, SpecError) as error:
        sys.stderr.write(f"mmrouter router: {error}\n")
        return 2

    async def serve() -> None:
        router = Router(settings)
        shorten_collections()
        switch_threads_often()
        await router.run()

    try:
        uvloop.run(serve())
    except ModelFolderError as error:
        sys.stderr.write(f"mmrouter router: {error}; metadata comes from spec.model.volume or the hub\n")
        return 2
    except CertificateError as error:
        sys.stderr.write(f"mmrouter router: certificate: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
