"""``mmrouter fetch-metadata``: a model's metadata files from the hub, for a router without ``model.volume``.

An init container runs it; it ends with status 0 only when the folder holds what the router reads, so a frontend never
starts on half a model. Weights are not fetched. HF_ENDPOINT names a mirror, HF_TOKEN a token.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Final

from mmrouter_lib.api import MMRouterDeployment, SpecError, load_deployment
from mmrouter_lib.api.paths import CONFIG_DIR, MODEL_DIR

PATTERNS: Final = ("*.json", "*.jinja", "*.txt", "*.model")
"""What tokenizers, templates and processors are read from; a pattern's star matches folders too."""
NOT_WANTED: Final = ("*/*", "*.index.json")
"""Variants of the model in folders of their own, and the tables of contents of its weights."""

log = logging.getLogger("mmrouter.fetch")


class FetchError(Exception):
    """The files cannot be had; the message says why."""


def fetch(deployment: MMRouterDeployment, folder: Path) -> str:
    """Put the metadata files of ``model.id`` at ``model.revision`` into ``folder`` and return the commit.

    Raises :class:`FetchError`.
    """
    # Reads its environment when it is imported, and is of no use to a router that runs.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # a mirror speaks plain HTTP
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

    model = deployment.spec.model
    try:
        # One commit for all files: a branch may move while they come.
        commit = HfApi().model_info(model.id, revision=model.revision).sha or model.revision
        snapshot_download(
            model.id, revision=commit, local_dir=folder, allow_patterns=list(PATTERNS), ignore_patterns=list(NOT_WANTED)
        )
    except Exception as error:
        # The hub's own errors, and those of the HTTP client that the library's release happens to use.
        raise FetchError(f"{model.id} at {model.revision}: {_first_line(error)}") from error
    if not (folder / "config.json").is_file():
        raise FetchError(f"{model.id} at {model.revision} has no config.json")
    return commit


def main() -> int:
    """Return the exit status: 0 done, 1 try again, 2 the configuration is wrong; the last line says why."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    folder = Path(os.environ.get("MMROUTER_MODEL_DIR", MODEL_DIR))
    try:
        deployment = load_deployment(Path(os.environ.get("MMROUTER_CONFIG", CONFIG_DIR)) / "deployment.json")
        commit = fetch(deployment, folder)
    except (OSError, SpecError) as error:
        sys.stderr.write(f"mmrouter fetch-metadata: {error}\n")
        return 2
    except FetchError as error:
        sys.stderr.write(f"mmrouter fetch-metadata: {error}\n")
        return 1
    log.info("%s at commit %s", deployment.spec.model.id, commit)
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
