"""Private randomness for one block of torch code, without touching the process's generators.

A host may share its process with a trainer: building an expert or replaying its dropout must neither disturb the
trainer's random numbers nor be disturbed by them. `torch.random.fork_rng` cannot promise that, since torch's default
generators belong to the process. A dispatch mode is local to its thread: it hands every random operation a generator of
our own. Given the same seed, the numbers are those that `torch.manual_seed(seed)` would have led to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default
_RAND_LIKE = torch.ops.aten.rand_like.default
_RANDN_LIKE = torch.ops.aten.randn_like.default
_GENERATOR_VARIANTS = {"default": "generator", "low": "low_generator"}
"""Factories such as `aten::rand` take a generator in an overload of their own."""


def expert_seed(run_id: bytes, uid: str) -> int:
    """The seed of an expert's initial weights: the same on every host of a run."""
    return (
        int.from_bytes(hashlib.sha256(b"swarm/expert-seed\0" + run_id + b"\0" + uid.encode()).digest()[:8], "big") >> 1
    )


class PrivateRandomness(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, random operations of this thread draw from private generators that start at `seed`.

    Operations that accept no generator (fused attention dropout on CUDA, for instance) run after seeding their device's
    default generator from the private one and restoring it afterwards; only those can be seen by other threads.

    Attributes:
        draws: Random operations seen so far.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.draws = 0

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.draws += 1
        device = _device_of(args, kwargs)
        if device.type == "meta" or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        generator = self._generator(device)
        if any(a.name == "generator" for a in func._schema.arguments):
            return func(*args, **{**kwargs, "generator": generator})
        variant = getattr(func.overloadpacket, _GENERATOR_VARIANTS.get(func._overloadname, ""), None)
        if variant is not None:
            return variant(*args, **{**kwargs, "generator": generator})
        if func is _RAND_LIKE:
            return torch.empty_like(*args, **kwargs).uniform_(generator=generator)
        if func is _RANDN_LIKE:
            return torch.empty_like(*args, **kwargs).normal_(generator=generator)
        if func is _NATIVE_DROPOUT:
            return _dropout(generator, *args, **kwargs)
        return _with_default_generator(generator, lambda: func(*args, **kwargs))


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.device
    device = kwargs.get("device")
    return torch.device(device) if device is not None else torch.device("cpu")


def _dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `aten::native_dropout` computes, with our generator."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p >= 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
    return x * mask / (1 - p), mask.bool()


def _with_default_generator(generator: torch.Generator, operation: Callable[[], Any]) -> Any:
    device = generator.device
    seed = int(torch.randint(0, 1 << 62, (), generator=generator, device=device).item())
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        return operation()
