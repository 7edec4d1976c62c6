"""How the sidecar's processes write their log."""

import logging
import sys


def log_to_stderr() -> None:
    """Write every line to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
