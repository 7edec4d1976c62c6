"""The sidecar: one process beside each engine that turns its KV events into the feed for routers."""

import logging
import sys


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
