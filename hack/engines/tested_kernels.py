"""Let a newer vLLM, of which there is no CPU build, load the compiled part of the tested release.

``newer_vllm_env.py`` copies this module into its environment. It is used where ``MMROUTER_TESTED_KERNELS`` is set: the
environment's other tests prove code that has no compiled part.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path


class Kernels:
    """Finds ``vllm._C`` and its variants in the first folder of the import path that has them."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        package, _, module = name.rpartition(".")
        if package != "vllm" or not module.startswith("_C"):
            return None
        found = (Path(folder, "vllm", f"{module}.abi3.so") for folder in sys.path)
        file = next((file for file in found if file.is_file()), None)
        return importlib.util.spec_from_file_location(name, file) if file else None


def install() -> None:
    sys.meta_path.insert(0, Kernels)
