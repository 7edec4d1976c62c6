"""Licences of the dependencies as SPDX expressions, and the ones that the project accepts. Pure, but for metadata of
installed distributions.
"""

import importlib.metadata
import re
from typing import Final

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

ALLOWED: Final = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT"),
        *("MIT-CMU", "MPL-2.0", "PSF-2.0", "Unicode-3.0", "Zlib"),
    )
)
"""Licences that allow distribution in an image under Apache-2.0. MPL-2.0 has conditions for changed files only, and the
images change none."""
NOT_IN_IMAGES: Final = {"pycountry": "LGPL-2.1-only"}
"""Distributions that no image has, and their licence, which is accepted there alone: an optional extra installs them,
unchanged, from where their authors publish them."""
ALLOWED_EXCEPTIONS: Final = frozenset({"LLVM-exception"})
WRITTEN_OUT: Final = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
}
"""How older metadata and classifiers write a licence -> its SPDX identifier."""
BY_NAME: Final = {
    "jinja2": "BSD-3-Clause",
    "numpy": "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0",
    "oss-harmony": "Apache-2.0",
    "tiktoken": "MIT",
}
"""Distributions whose metadata name a family of licences only, have a text, or none; their licence files have this
one's."""
CRATES: Final = {
    "target-lexicon": "Apache-2.0 WITH LLVM-exception",
    "unicode-ident": "(MIT OR Apache-2.0) AND Unicode-3.0",
    "xxhash-rust": "BSL-1.0",
}
"""Crates of the compiled form whose licence is not :data:`CRATE`; Cargo.lock has no licences."""
CRATE: Final = "MIT OR Apache-2.0"


class UnknownLicenceError(Exception):
    """A distribution's metadata name no licence that is known here."""


def licence_of(name: str) -> str:
    """Return the SPDX expression of an installed distribution.

    Raises :class:`UnknownLicenceError`, and ``PackageNotFoundError`` where it is not installed.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    metadata = importlib.metadata.metadata(name)
    stated = [text for field in ("License-Expression", "License") for text in metadata.get_all(field) or []]
    classifiers = [text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or [] if "License ::" in text]
    for text in (*stated, *classifiers):
        try:
            return canonicalize_license_expression(WRITTEN_OUT.get(text, text))
        except InvalidLicenseExpression:
            continue
    raise UnknownLicenceError(f"{name}: its metadata name no licence of hack/supply_chain/licences.py")


def refused_parts(expression: str) -> list[str]:
    """Return the licences and exceptions in an SPDX expression that are not accepted, alternatives included."""
    words = re.findall(r"[A-Za-z0-9.+-]+", expression)
    named = [word for word in words if word not in ("AND", "OR", "WITH")]
    return [word for word in named if word not in ALLOWED | ALLOWED_EXCEPTIONS]
