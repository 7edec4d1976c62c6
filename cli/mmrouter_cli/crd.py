"""The CustomResourceDefinition as YAML text, and whether a file is up to date."""

from pathlib import Path
from typing import Any

import yaml

from mmrouter_lib.api import crd

_HEADER = "# Made from the models in mmrouter/api by `mmrouter crd`: change those, not this file.\n"


class _Dumper(yaml.SafeDumper):
    """Writes equal values out each time: anchors are hard to read and some YAML readers refuse them."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def text() -> str:
    """Return the definition as YAML, byte for byte the same on every run."""
    body = yaml.dump(crd.definition(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return _HEADER + body


def is_current(file: Path) -> bool:
    """Return whether the file equals :func:`text`. Raises ``OSError``."""
    return file.read_bytes() == text().encode()
