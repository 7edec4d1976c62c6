"""The compiled forms of two loops, where they are installed (docs/native.md). Nothing else imports them.

``chain`` and ``pack_token_ids`` are ``None`` where there is no compiled form: then the Python form, which is the
reference and gives the same results, does all the work. It also does whatever the compiled one answers ``None`` to.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

log = logging.getLogger("mmrouter.native")

REVISION = 1
"""What the functions take, return and do, as a number: a module with another one is not used."""
SWITCH = "MMROUTER_NATIVE"
"""``0`` leaves a compiled form that is installed unused."""

Chain = Callable[["array[int]", int, int, Mapping[int, bytes], int], bytes | None]
"""(ids, block size, blocks, extras, parent) -> packed keys, as of ``mmrouter_lib.block_keys.chain``."""
PackTokenIds = Callable[[bytes, int], bytes | None]
"""(an engine's payload, bytes per id) -> the payload with its token ids as bytes."""

chain: Chain | None = None
pack_token_ids: PackTokenIds | None = None
form = "python"
"""``native`` or ``python``: which one does the work in this process."""
why = ""
"""Why it is not the compiled one."""


def load(environment: Mapping[str, str] = os.environ, module: str = "mmrouter_native") -> None:
    """Take the compiled form if there is one that fits. Never raises: what does not load is said in the log."""
    global chain, pack_token_ids, form, why  # noqa: PLW0603 - one form per process, looked up at each call
    chain, pack_token_ids, form, why = None, None, "python", ""
    if environment.get(SWITCH) == "0":
        why = f"{SWITCH} is 0"
        return
    if sys.byteorder != "little":
        why = "the compiled form is for little-endian machines"
        return
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        why = f"{module} is not installed"
        return
    except ImportError as error:  # of another processor or C library
        why = f"{module} does not load: {error}"
    else:
        if getattr(found, "REVISION", None) == REVISION:
            chain, pack_token_ids, form = found.chain, found.pack_token_ids, "native"
            return
        why = f"{module} is of revision {getattr(found, 'REVISION', None)}, and this code is for {REVISION}"
    log.warning("%s; the Python form does the work", why)


load()
