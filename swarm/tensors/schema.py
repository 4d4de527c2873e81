"""What a set of tensors looks like: dtype names on the wire, metadata, schema hashes and finite checks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
import torch
from torch import Tensor

from swarm.errors import NonFiniteError, SchemaMismatchError, UnsupportedDtypeError

_NAMES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""Every dtype that may travel, by the name it has on the wire."""
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The wire name of every dtype that may travel."""

MAX_DIMS = 64
_FINITE_BLOCK = 1 << 20
_FLOAT32_BYTES = 4
_SUMMED = frozenset((torch.float32, torch.float64))
_HALF_INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
"""The bits of +infinity: those of a positive number are less, those of NaN are not."""
_SIGN_BIT = 0x8000
_FLOAT8 = frozenset(d for n, d in DTYPES.items() if n.startswith("float8"))


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a dtype, e.g. `float32`. Raises `UnsupportedDtypeError`."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"Tensors of {dtype} cannot travel.", fix=f"Convert to one of {', '.join(DTYPES)}."
        ) from None


def parse_dtype(name: object) -> torch.dtype:
    """The dtype of a wire name. Raises `UnsupportedDtypeError`."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise UnsupportedDtypeError(
            f"The dtype {str(name)[:60]!r} is unknown here.", fix="Update swarm, or convert the tensor."
        )
    return dtype


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def schema_hash(tensors: Mapping[str, Tensor | TensorMeta] | Sequence[Tensor | TensorMeta]) -> bytes:
    """SHA-256 over names (or positions), shapes and dtypes in order: equal for peers that may average with each other.

    Raises:
        UnsupportedDtypeError: A dtype cannot travel.
    """
    named: Iterable[tuple[str, Tensor | TensorMeta]]
    named = tensors.items() if isinstance(tensors, Mapping) else ((str(i), t) for i, t in enumerate(tensors))
    rows = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in named]
    return hashlib.sha256(b"swarm/schema/1\0" + msgpack.packb(rows)).digest()


def check_schema(what: str, tensors: Sequence[Tensor], expected: Sequence[TensorMeta]) -> None:
    """Raise `SchemaMismatchError` unless the tensors have exactly these shapes and dtypes.

    Args:
        what: What the tensors are, to start the message with, e.g. `The inputs of ffn.0.1`.
    """
    if len(tensors) != len(expected):
        raise SchemaMismatchError(f"{what}: {len(tensors)} tensors where {len(expected)} are expected.")
    for index, (tensor, meta) in enumerate(zip(tensors, expected, strict=True)):
        if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
            raise SchemaMismatchError(f"{what}: tensor {index} is {TensorMeta.of(tensor)} where {meta} is expected.")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. About 15 microseconds per MiB; integers are free."""
    if tensor.dtype in _SUMMED and math.isfinite(tensor.sum().item()):
        return True  # the common case, with as few operations as there can be
    if tensor.device.type == "cpu" and tensor.dtype in _HALF_INFINITY and tensor.numel():
        return _is_finite_half(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in _FLOAT8:
        return all(
            bool(torch.isfinite(block.float()).all()) for block in torch.split(tensor.reshape(-1), _FINITE_BLOCK)
        )
    # A finite sum proves finite terms and is four times cheaper; large finite terms may still overflow it.
    if math.isfinite(tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize < _FLOAT32_BYTES else None).item()):
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _is_finite_half(tensor: Tensor) -> bool:
    """The same for fp16 and bf16 on the CPU by their bits: a third of what a sum takes."""
    infinity = _HALF_INFINITY[tensor.dtype]
    bits = tensor.detach().resolve_neg().view(torch.int16).numpy()
    return int(bits.max()) < infinity and int(bits.view(np.uint16).max()) < infinity + _SIGN_BIT


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise `NonFiniteError` if the tensor holds NaN or infinity.

    Args:
        what: What the tensor is, to name in the message, e.g. `gradient of ffn.0.1`.
    """
    if not is_finite(tensor):
        raise NonFiniteError(
            f"The {what} holds NaN or infinity.", fix="Lower the learning rate, clip gradients or check the inputs."
        )
