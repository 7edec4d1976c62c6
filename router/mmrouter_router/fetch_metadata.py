"""``mmrouter fetch-metadata``: downloads a model's metadata (no weights) for a router without ``model.volume``.

An init container runs it until the folder holds what the router reads. HF_ENDPOINT names a mirror, HF_TOKEN a token.
"""

import logging
import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from mmrouter_lib.api import MMRouterDeployment, SpecError, load_deployment
from mmrouter_lib.model_folder import MISTRAL_WEIGHTS, TOKENIZER_CODE, TOOL_CODE
from mmrouter_lib.pod_paths import CONFIG_DIR, MODEL_DIR

PATTERNS: Final = ("*.json", "*.jinja", "*.txt", "*.model", "*.model.v*", TOKENIZER_CODE, TOOL_CODE)
"""Tokenizers, templates and processors. Of code, the files alone that are read; none is run."""
IGNORED: Final = ("*/*", "*.index.json")  # variants of the model in sub-folders, and the index files of its weights

log = logging.getLogger("mmrouter.fetch")


class FetchError(Exception):
    """The download failed; the message says why."""


def fetch(deployment: MMRouterDeployment, folder: Path) -> str:
    """Download the metadata files of the model into ``folder`` and return the commit. Raises :class:`FetchError`.

    Weights in Mistral's format become empty files, because they decide which tokenizer vLLM takes.
    """
    # Imported here because it reads the environment on import, and a running router does not need it.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # a mirror speaks plain HTTP
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

    model = deployment.spec.model
    try:
        # Pin the commit: a branch may move during the download.
        info = HfApi().model_info(model.id, revision=model.revision)
        commit = info.sha or model.revision
        snapshot_download(
            model.id, revision=commit, local_dir=folder, allow_patterns=list(PATTERNS), ignore_patterns=list(IGNORED)
        )
    except Exception as error:
        # The hub's own errors, and those of the HTTP client that its release uses.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(f"{model.id} at {model.revision}: {reason}") from error
    for name in (file.rfilename for file in info.siblings or ()):
        if fnmatchcase(name, MISTRAL_WEIGHTS) and "/" not in name:
            (folder / name).touch()
    if not (folder / "config.json").is_file():
        raise FetchError(f"{model.id} at {model.revision} has no config.json")
    return commit


def main() -> int:
    """Return the exit status: 0 done, 1 try again, 2 invalid configuration; the last log line gives the reason."""
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
