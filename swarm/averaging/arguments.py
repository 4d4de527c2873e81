"""What callers hand to an averager, checked before anybody else is involved: each mistake has a cause and a fix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

from swarm.errors import SchemaMismatchError, UsageError
from swarm.tensors.aliasing import shares_memory
from swarm.tensors.schema import TensorMeta

MAX_KEY_BYTES = 255


def checked_key(key: str) -> str:
    """Raises `UsageError` for a key that cannot travel in a message."""
    fix = f"Use a short text, such as the model's name: at most {MAX_KEY_BYTES} bytes in UTF-8."
    if not isinstance(key, str):
        raise UsageError(f"An averaging key of type {type(key).__name__} cannot be.", fix=fix)
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"The averaging key {key[:20]!r} is no text that UTF-8 can hold.", fix=fix) from error
    if not 0 < nbytes <= MAX_KEY_BYTES:
        raise UsageError(f"An averaging key of {nbytes} bytes cannot be.", fix=fix)
    return key


def checked_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors as a list. Raises `UsageError` unless each of their elements can be written in place."""
    if tensors is None or isinstance(tensors, Tensor):
        raise UsageError("There is no list of tensors to average.", fix="Pass a list, such as [tensor].")
    found = list(tensors)
    if not found:
        raise UsageError("There are no tensors to average.", fix="Pass at least one tensor.")
    strangers = [type(t).__name__ for t in found if not isinstance(t, Tensor)]
    if strangers:
        raise UsageError(f"A {strangers[0]} cannot be averaged.", fix="Pass a list of torch tensors.")
    if any(t.layout is not torch.strided or t.is_meta or t.is_inference() for t in found):
        raise UsageError(
            "A tensor cannot be written in place: it is sparse, on the meta device, or from inference mode.",
            fix="Average dense tensors that hold data.",
        )
    if shares_memory(found):
        raise UsageError(
            "Elements of the tensors share memory, so that each cannot have an average of its own.",
            fix="Pass each tensor once, and clone() what expand() or overlapping views made.",
        )
    return found


def check_unchanged(tensors: Sequence[Tensor], metas: Sequence[TensorMeta]) -> None:
    """Raises `SchemaMismatchError` if tensors are not any more what the averager was made for."""
    if [TensorMeta.of(t) for t in tensors] != list(metas):
        raise SchemaMismatchError(
            "A tensor has another shape or dtype than when the averager was made.",
            fix="Close the averager and make a new one after changing the model.",
        )


def checked_weight(weight: SupportsFloat) -> float:
    """The weight as a float. Raises `UsageError` unless it is a finite number that is not negative."""
    number = _number(weight, "A weight", "Use a finite number that is not negative.")
    if not math.isfinite(number) or number < 0:
        raise UsageError(
            f"A weight of {number:g} (a {type(weight).__name__}) cannot be.",
            fix="Use a finite number that is not negative.",
        )
    return number


def checked_seconds(seconds: SupportsFloat, what: str) -> float:
    """The time as a float. Raises `UsageError` unless it is a number that is not negative."""
    number = _number(seconds, what, "Use seconds, as a number that is not negative.")
    if not number >= 0:
        raise UsageError(f"{what} of {number:g} s cannot be.", fix="Use seconds, as a number that is not negative.")
    return number


def _number(value: SupportsFloat, what: str, fix: str) -> float:
    try:
        # float() would also read strings
        return float(value) if isinstance(value, SupportsFloat) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises RuntimeError
        raise UsageError(f"{what} of type {type(value).__name__} is no number: {error}.", fix=fix) from error
