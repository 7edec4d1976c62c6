"""Load the optional compiled extension ``mmrouter_native`` (docs/native.md). Only this module imports it.

Its functions and its class are ``None`` without it; callers then use the Python implementation, which is the reference
and returns the same results. They also do so when a compiled function returns ``None``.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array

    import mmrouter_native

log = logging.getLogger("mmrouter.native")

REVISION = 2  # version of the functions' interface and behaviour; a module with another one is not used
SWITCH = "MMROUTER_NATIVE"  # environment variable; 0 disables an installed extension

Chain = Callable[["array[int]", int, int, Mapping[int, bytes], int], bytes | None]
"""(ids, block size, blocks, extras, parent) -> packed keys, as of ``mmrouter_lib.block_keys.chain``."""
PackTokenIds = Callable[[bytes, int], bytes | None]
"""(an engine's payload, bytes per id) -> the payload with its token ids packed into bytes."""

chain: Chain | None = None
pack_token_ids: PackTokenIds | None = None
HolderTable: "type[mmrouter_native.HolderTable] | None" = None
"""The twin of ``mmrouter_router.fleet.holder_table.HolderTable``."""
form = "python"  # the implementation in use by this process: native or python
why = ""  # why the extension is not in use


def load(environment: Mapping[str, str] = os.environ, module: str = "mmrouter_native") -> None:
    """Use the extension if one with this revision is installed. Never raises: a module that does not load is logged."""
    global chain, pack_token_ids, HolderTable, form, why  # noqa: PLW0603 - one form per process, looked up at each call
    chain, pack_token_ids, HolderTable, form, why = None, None, None, "python", ""
    if environment.get(SWITCH) == "0":
        why = f"{SWITCH} is 0"
        return
    if sys.byteorder != "little":
        why = "the extension is for little-endian machines"
        return
    try:
        extension = importlib.import_module(module)
    except ModuleNotFoundError:
        why = f"{module} is not installed"
        return
    except ImportError as error:  # for another processor or C library
        why = f"{module} does not load: {error}"
    else:
        if getattr(extension, "REVISION", None) == REVISION:
            chain, pack_token_ids, form = extension.chain, extension.pack_token_ids, "native"
            HolderTable = extension.HolderTable
            return
        why = f"{module} is of revision {getattr(extension, 'REVISION', None)}, and this code is for {REVISION}"
    log.warning("%s; using the Python implementation", why)


load()
