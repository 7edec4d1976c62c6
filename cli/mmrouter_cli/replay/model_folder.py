"""The model folder that ``--model`` names."""

from pathlib import Path

from mmrouter_cli.replay.capture_reader import CaptureError
from mmrouter_lib.families import Family, ModelFolderError, ProcessorLimits, load_family
from mmrouter_lib.prompt import Prompter


def load(folder: Path, limits: ProcessorLimits | None = None) -> tuple[Family, Prompter]:
    """Return what renders a folder's prompts under processor options. Raises :class:`CaptureError`."""
    try:
        family = load_family(folder, limits)
        if family is None:
            raise CaptureError(f"--model {folder} is of no family that is modelled")
        return family, Prompter.load(folder, family=family)
    except (ModelFolderError, OSError) as error:
        raise CaptureError(f"--model {folder}: {error}") from error
