"""The feed's CURVE keys as files of a mounted Secret, which change while keys rotate (docs/operator.md).

A file holds one key in Z85 per line: one as a rule, and during a rotation two, of which the first is preferred. All
processes of a deployment see a change at different times, so a process with the old files and one with the new files
must be able to connect.
"""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

log = logging.getLogger("mmrouter.keys")

ROUTER_SECRET: Final = "router.curve.secret"  # noqa: S105 - the name of a file
ROUTER_PUBLIC: Final = "router.curve.public"
SIDECAR_SECRET: Final = "sidecar.curve.secret"  # noqa: S105
SIDECAR_PUBLIC: Final = "sidecar.curve.public"
CHECK_SECONDS: Final = 1.0
MOST_KEYS: Final = 2
_CHARACTERS: Final = 40

Keys = tuple[bytes, ...]


class FeedKeyError(ValueError):
    """A file or an entry holds no valid keys; the message names it, and never its content."""


def parse_keys(name: str, content: bytes) -> Keys:
    """Return the keys of a file or an entry ``name``. Raises :class:`FeedKeyError`."""
    keys = tuple(content.split())
    if not 1 <= len(keys) <= MOST_KEYS or any(len(key) != _CHARACTERS or not key.isascii() for key in keys):
        raise FeedKeyError(f"{name} is not a Z85 key of {_CHARACTERS} characters, or two of them on a line each")
    return keys


def fingerprint(public: bytes) -> str:
    """Return the name of a public key in heartbeats and reports: 8 hex digits of its SHA-256."""
    return hashlib.sha256(public).hexdigest()[:8]


def read_keys(folder: Path, *names: str) -> dict[str, Keys]:
    """Return the keys by file. Raises ``OSError`` and :class:`FeedKeyError`, whose messages name the file."""
    behind = folder.resolve()  # a mounted Secret changes by one link, so all files are of the same version
    return {name: parse_keys(str(folder / name), (behind / name).read_bytes()) for name in names}


class KeyWatch:
    """Some files of keys in a folder, for a process that looks for changes; ``identity_key``: the process's own."""

    def __init__(self, folder: Path, identity_key: bytes, *names: str) -> None:
        self._folder, self._identity_key, self._names = folder, identity_key, names
        self._seen: Mapping[str, Keys] = {}
        self._problem = ""

    def changed(self) -> Mapping[str, Keys] | None:
        """Return the keys if they differ from those of the last call; ``None`` if they are equal or unusable.

        Keys beside another identity key are those of a Secret that was created anew, and for new pods only.
        """
        try:
            if (self._folder / "identity.key").read_bytes() != self._identity_key:
                raise FeedKeyError("the Secret was created anew: its keys are for new pods")
            keys = read_keys(self._folder, *self._names)
        except (OSError, FeedKeyError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                log.warning("the feed keeps its present keys: %s", error)
            return None
        self._problem = ""
        before, self._seen = self._seen, keys
        return keys if keys != before else None
