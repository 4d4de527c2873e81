"""The optimizer of one expert: gradients are summed, clipped and applied at the schedule's learning rate.

A *contribution* is the gradient of one request (deferred parts belong to the contribution that follows them). Without
`accumulate_tokens`, contributions that are computed as one batch are summed into one step, as if each had made a step
of its own. With it, contributions are collected until they cover that many tokens, and the step's gradient is their
mean: it has the size of one contribution however many it took, so that the learning rate keeps its meaning.

What is collected but not applied yet belongs to this replica alone: no snapshot carries it, or two replicas would apply
it. A host that gives an expert up makes a step of it first (`flush`); one that dies loses it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from swarm.errors import ExpertFailedError, NonFiniteError
from swarm.experts.registry import build_optimizer
from swarm.experts.spec import ExpertGrid, OptimizerSpec

MAX_GRADIENT_NORM = 1e18
"""Larger gradients are refused like infinite ones: their squares overflow within an optimizer."""
_STAND_IN_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)


def lr_factor(spec: OptimizerSpec, step: int) -> float:
    """What the learning rate is multiplied by at step `step` (0 is the first): warm-up, then the schedule.

    Linear warm-up reaches 1 with step `warmup_steps - 1`; `linear` and `cosine` fall from there to `min_lr_fraction`
    at `total_steps` and stay there.
    """
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    if spec.schedule == "constant" or spec.total_steps is None:
        return 1.0
    done = min(1.0, (step - spec.warmup_steps) / (spec.total_steps - spec.warmup_steps))
    left = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.min_lr_fraction + (1.0 - spec.min_lr_fraction) * left


class Gradient:
    """The gradient of all parameters of an expert. Never changed in place: autograd may hand out one tensor twice."""

    __slots__ = ("_norm", "parts")

    def __init__(self, parts: list[Tensor | None]) -> None:
        self.parts = parts
        self._norm: float | None = None

    def plus(self, other: Gradient) -> Gradient:
        """The sum of both."""
        if all(p is None for p in self.parts):
            return other
        sums = [a if b is None else b if a is None else a + b for a, b in zip(self.parts, other.parts, strict=True)]
        return Gradient(sums)

    def over(self, divisor: float) -> Gradient:
        """The gradient divided by a number."""
        return self if divisor == 1.0 else Gradient([None if p is None else p / divisor for p in self.parts])

    def check(self, uid: str) -> float:
        """The 2-norm. Raises `NonFiniteError` if an optimizer could turn the gradient into non-finite weights."""
        if self._norm is None:
            norms = [torch.linalg.vector_norm(p, dtype=torch.float32) for p in self.parts if p is not None]
            self._norm = float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
        if not self._norm <= MAX_GRADIENT_NORM:
            raise NonFiniteError(
                f"The parameter gradients of {uid} overflow.", fix="Lower the learning rate, or clip the loss."
            )
        return self._norm


class ExpertOptimizer:
    """See the module's docstring. Used from the device worker's thread.

    Args:
        grid: Names the optimizer and how it is used.
        uid: The expert, for messages.
        parameters: The trainable ones, in the module's order.

    Attributes:
        torch: The torch optimizer; none for an expert without trainable parameters.
        steps: Steps applied since the initial weights, on whichever host: the expert's weight version. The schedule
            goes by it, so that it survives moves between hosts.
        made: Steps that this replica has made itself.
        samples: Tokens whose gradients have become steps here; whoever merges replicas sets it back.
        pending_tokens, pending_requests: What has been collected for the next step.

    Raises:
        ConfigError, UnknownOptimizerError: The optimizer cannot be built.
    """

    def __init__(self, grid: ExpertGrid, uid: str, parameters: Sequence[Parameter]) -> None:
        self._grid = grid
        self._spec = grid.optimizer
        self._uid = uid
        self._parameters = list(parameters)
        self.torch = build_optimizer(grid, self._parameters)
        self._base_lrs = [float(group.get("lr", 0.0)) for group in self.torch.param_groups] if self.torch else []
        self.steps = 0
        self.samples = 0
        self.made = 0
        self._drop_pending()

    def _drop_pending(self) -> None:
        self._pending = Gradient([None] * len(self._parameters))
        self.pending_tokens = self.pending_requests = 0

    def add(self, gradient: Gradient, tokens: int, requests: int) -> bool:
        """Take a gradient over, and make a step if it is due. Returns whether there was one.

        Args:
            gradient: Of `requests` contributions together.
            tokens: How many tokens it comes from.
            requests: 0 for a deferred part, which waits for the contribution that it belongs to.

        Raises:
            NonFiniteError: With it, the sum would overflow; nothing has changed.
            ExpertFailedError: The optimizer failed; the step counts, as its weights may have changed.
        """
        if self.torch is None:
            return False
        total = self._pending.plus(gradient)
        total.check(self._uid)
        self._pending = total
        self.pending_tokens += tokens
        self.pending_requests += requests
        if not requests or self.pending_tokens < (self._spec.accumulate_tokens or 0):
            return False
        self._step()
        return True

    def flush(self) -> bool:
        """Make a step of what has been collected, if anything has; for a replica that is given up. Raises as `add`."""
        if self.torch is None or not self.pending_tokens:
            return False
        self._step()
        return True

    def _step(self) -> None:
        assert self.torch is not None
        mean = self._spec.accumulate_tokens is not None
        gradient = self._pending.over(max(1, self.pending_requests) if mean else 1)
        tokens = self.pending_tokens
        self._drop_pending()
        limit = self._spec.clip_norm
        if limit is not None and (norm := gradient.check(self._uid)) > limit:
            gradient = gradient.over(norm / limit)
        factor = lr_factor(self._spec, self.steps)
        for group, base in zip(self.torch.param_groups, self._base_lrs, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(base * factor)
            else:
                group["lr"] = base * factor
        for parameter, part in zip(self._parameters, gradient.parts, strict=True):
            parameter.grad = part
        try:
            self.torch.step()
        except Exception as error:
            text = f"The optimizer of {self._uid} raised {type(error).__name__}: {str(error)[:300]}"
            raise ExpertFailedError(text) from error
        finally:
            self.torch.zero_grad(set_to_none=True)
            # kept graphs must not outlive the weights, whatever happened
            self.steps += 1
            self.made += 1
            self.samples += tokens

    # ---- state

    def state(self) -> dict[int, dict[str, Any]]:
        """The optimizer's own values, by the parameter's position: live tensors and numbers, not copies."""
        return dict(self.torch.state_dict()["state"]) if self.torch is not None else {}

    def set_state(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Adopt such values (copied); groups and learning rates stay our own. The caller has checked them."""
        if self.torch is not None:
            self.torch.load_state_dict({**self.torch.state_dict(), "state": {i: dict(v) for i, v in state.items()}})

    def expected_state(self) -> list[dict[str, Any]]:
        """For each parameter, what its optimizer keeps: numbers as they are, tensors on the meta device.

        Found out with small stand-ins whose sizes all differ, so that each size of the state tells which of the
        parameter's it follows (Adafactor keeps sums of rows and columns).
        """
        if self.torch is None:
            return []
        stand_ins = [
            Parameter(torch.zeros(_STAND_IN_SIZES[: p.dim()], dtype=p.dtype, device=p.device)) for p in self._parameters
        ]
        optimizer = build_optimizer(self._grid, stand_ins)
        assert optimizer is not None
        for stand_in in stand_ins:
            stand_in.grad = torch.zeros_like(stand_in)
        optimizer.step()
        return [
            {name: _shaped_like(value, p) for name, value in optimizer.state.get(s, {}).items()}
            for s, p in zip(stand_ins, self._parameters, strict=True)
        ]


def _shaped_like(value: Any, parameter: Parameter) -> Any:
    if not isinstance(value, Tensor):
        return value
    sizes = dict(zip(_STAND_IN_SIZES, parameter.shape, strict=False))
    return torch.empty([sizes.get(s, s) for s in value.shape], dtype=value.dtype, device="meta")
