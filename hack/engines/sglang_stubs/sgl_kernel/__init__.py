"""Stands in for SGLang's compiled kernels in the test environment, because no package index has the CPU build.

The engine imports names from here when it starts and uses none of them with PyTorch's own attention on CPU, except the
operator written out below. Every other name imports, and raises when it is called: a kernel that is missing stops the
engine instead of changing what it computes.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

PACKAGE = __name__


class Missing:
    """A kernel that is not there, or a namespace of such kernels."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._path}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"the test environment has no compiled kernels: {self._path}")


class Submodule(ModuleType):
    __path__ = ()  # makes it a package

    def __getattr__(self, name: str) -> Missing:
        return getattr(Missing(self.__name__), name)


class Finder:
    """Makes every submodule importable; the engine imports several by name."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, Finder, is_package=True) if name.startswith(f"{PACKAGE}.") else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return Submodule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


class Operators:
    """``torch.ops.sgl_kernel``. The engine asks for operators to see what the build offers: only CPU ones are there."""

    @staticmethod
    def fused_qk_norm_cpu(
        query: torch.Tensor, key: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor, eps: float
    ) -> None:
        """Divide every head of query and key by its root mean square and scale it, in place (Qwen3's attention)."""
        for states, weight in ((query, query_weight), (key, key_weight)):
            heads = states.view(states.shape[0], -1, weight.numel())
            heads.copy_(torch.nn.functional.rms_norm(heads.float(), (weight.numel(),), weight.float(), eps))

    def __getattr__(self, name: str) -> Missing:
        if not name.endswith("_cpu"):
            raise AttributeError(name)
        return Missing(f"torch.ops.{PACKAGE}.{name}")


def __getattr__(name: str) -> Missing:
    return getattr(Missing(PACKAGE), name)


sys.meta_path.append(Finder)  # type: ignore[arg-type]
torch.ops.sgl_kernel = Operators()  # type: ignore[assignment]
