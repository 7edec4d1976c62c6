"""Lets SGLang's adapters run where no memory can be pinned, as on a CPU: their code asks for it without a look.

Python imports this at its start from a folder of ``PYTHONPATH``.
"""

from collections.abc import Callable
from typing import Any

import torch


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        return make(*arguments, **{name: value for name, value in options.items() if name != "pin_memory"})

    return made


for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
    setattr(torch, name, unpinned(getattr(torch, name)))
torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign, assignment, misc]
