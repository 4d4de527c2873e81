"""An expert's module behind `torch.compile`, or the module itself once compiling has failed.

Whose fault a failure is shows when the module runs uncompiled: if that works, the compiler is given up for good, with a
reason that becomes an event; if it fails as well, the request was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_WARM_SIZES = (2, 3)


class CompiledModule:
    """See the module's docstring. Called like the module.

    Args:
        module: The expert.
        backend: torch.compile's.

    Attributes:
        failure: Why the compiler was given up; empty while it works.
    """

    def __init__(self, module: nn.Module, backend: str) -> None:
        self._module = module
        self.failure = ""
        try:
            self._compiled: Any = torch.compile(module, dynamic=True, backend=backend)
        except Exception as error:  # noqa: BLE001 - any failure of a compiler means to do without it
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """Use the module itself from now on."""
        self._compiled = None
        self.failure = f"{type(error).__name__}: {str(error)[:300]}"

    def __call__(self, *inputs: Tensor) -> Any:
        if self._compiled is None:
            return self._module(*inputs)
        try:
            return self._compiled(*inputs)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            result = self._module(*inputs)
            self.give_up(error)
            return result

    def warm_up(self, examples: Sequence[Sequence[Tensor]]) -> None:
        """Compile before the first request waits for it, in training mode: forward with and without graph, backward."""
        for inputs in examples:
            with torch.no_grad():
                self(*inputs)
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
            result = self(*leaves)
            outputs = [o for o in ([result] if isinstance(result, Tensor) else result) if o.requires_grad]
            try:
                torch.autograd.grad(outputs, [x for x in leaves if x.requires_grad], outputs, allow_unused=True)
            except Exception as error:  # noqa: BLE001 - see the module's docstring
                self.give_up(error)


def warm_up_shapes(shape: Sequence[int | None]) -> list[list[int]]:
    """Sizes to compile for: two numbers of tokens, so that it is found out that they vary."""
    return [[size if s is None else s for s in shape] for size in _WARM_SIZES]
