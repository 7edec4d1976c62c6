"""Start-up hook of the engine's environment: lets a CUDA-built torchvision import beside a CPU torch.

``vllm_env.py`` copies this file into the environment's site-packages and calls :func:`install` from a ``.pth`` line.

torchvision's native library does not load beside a CPU torch. torchvision tolerates that, until its Python side
attaches meta kernels to operators that the library would have declared. Image resizing and normalising, all that the
processors use, are plain torch, so it is enough to declare those operators: calling them still fails, as it should.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# The module that attaches meta kernels: it is imported right after torchvision tried its native library, so by then it
# is known whether the operators are missing.
ATTACHES = "torchvision._meta_registrations"
OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declared: list[Any] = []  # torch withdraws a library's operators when the object is collected


class _Finder:
    """Stays on ``sys.meta_path`` for good: ``importlib.util.find_spec`` asks long before the import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != ATTACHES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def declare_first(module: ModuleType) -> None:
            declare_missing()
            execute(module)

        spec.loader.exec_module = declare_first  # type: ignore[method-assign]
        return spec


def declare_missing() -> None:
    """Declare the operators that torchvision's native library did not bring."""
    # Only the engine's environment has torch, and importing it at start-up would slow every Python process there.
    torch = importlib.import_module("torch")
    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            library.define(f"{name}{SIGNATURE}")
        _declared.append(library)


def install() -> None:
    if not any(isinstance(finder, type) and finder.__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)
