"""Codecs: how the elements of a tensor become bytes, by a name that travels in the header.

A codec cuts a flat tensor into units of `unit_elements` that are encoded independently of each other, so that a large
tensor is converted chunk by chunk while the network carries the chunks before it. `none` copies bytes; `fp16` and
`bf16` round to half precision. The lossy ones saturate: a finite value beyond the range of the format becomes the
largest finite value, while NaN and infinity stay what they are, so that the receiver's finite check still sees them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.errors import MalformedFrameError, UnsupportedDtypeError
from swarm.tensors.schema import DTYPE_NAMES

_EMPTY = memoryview(b"")
_NUMPY = frozenset((torch.float32, torch.float64, torch.int64, torch.int32))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes, without a copy. Writable; keeps the memory alive."""
    if tensor.numel() == 0:
        return _EMPTY
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def host_flat(tensor: Tensor) -> Tensor:
    """The elements of any strided tensor in order as a 1-d CPU tensor; copies only what is not laid out like that."""
    return device_flat(tensor).cpu()


def device_flat(tensor: Tensor) -> Tensor:
    """The elements of any strided tensor in order as a 1-d tensor where it lives; copies only if not contiguous."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1).contiguous()  # one element expanded to a shape flattens to a view of stride 0


def saturating_cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert between float dtypes so that no finite value becomes infinite; NaN and infinity stay."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    limit = torch.finfo(dtype).max
    if torch.finfo(tensor.dtype).max <= limit:
        return cast
    # A sum of bf16 is accumulated in fp32, and its range is that of fp32; a sum of fp16 would overflow soon.
    if math.isfinite(cast.sum(dtype=torch.float32 if dtype == torch.float16 else None).item()):
        return cast
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return torch.where(tensor.isinf(), cast, wide.clamp(-limit, limit).to(dtype))


class Codec(ABC):
    """One way to encode. Stateless and thread-safe.

    Attributes:
        name: The name in headers and settings.
        unit_elements: Elements that are encoded together; only a tensor's last unit may be shorter.
        is_copy: Encoding is copying the memory of the tensor.
    """

    name: str
    unit_elements: int = 1
    is_copy: bool = False

    @abstractmethod
    def carries(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact size of `numel` elements in bytes."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> memoryview:
        """Encode any strided tensor, or a whole number of units of one (flat), on any device."""

    @abstractmethod
    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        """Decode bytes (1-d uint8, whole units) into the flat CPU tensor `out`."""

    def decode(self, buffer: bytes | bytearray | memoryview, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode a whole tensor into memory of its own.

        Raises:
            UnsupportedDtypeError: The codec cannot carry this dtype.
            MalformedFrameError: The buffer has another size than the shape requires.
        """
        self.check(dtype)
        needed = self.encoded_nbytes(math.prod(shape), dtype)
        if len(buffer) != needed:
            raise MalformedFrameError(f"{len(buffer)} bytes where codec {self.name} needs {needed} for this shape.")
        staged = torch.empty(needed, dtype=torch.uint8)
        if needed:
            tensor_bytes(staged)[:] = memoryview(buffer).cast("B")
        out = torch.empty(tuple(shape), dtype=dtype)
        self.decode_into(staged, out.view(-1))
        return out

    def check(self, dtype: torch.dtype) -> None:
        """Raise `UnsupportedDtypeError` unless this codec carries the dtype."""
        if not self.carries(dtype):
            raise UnsupportedDtypeError(
                f"Codec {self.name} cannot carry {str(dtype).removeprefix('torch.')}.", fix='Use codec "none" for it.'
            )


class NoneCodec(Codec):
    """The memory of the tensor as it is, little-endian."""

    name = "none"
    is_copy = True

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPE_NAMES

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * dtype.itemsize

    def encode(self, tensor: Tensor) -> memoryview:
        if tensor.dtype in _NUMPY and tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.numel():
            return tensor.numpy(force=True).data.cast("B")
        return tensor_bytes(host_flat(tensor))

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        if out.numel():
            out.view(torch.uint8).copy_(encoded)


class HalfCodec(Codec):
    """Two bytes an element: IEEE half (`fp16`) or bfloat16 (`bf16`), saturating. Carries floats of 2, 4 or 8 bytes."""

    _CARRIED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def carries(self, dtype: torch.dtype) -> bool:
        return dtype in self._CARRIED

    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def encode(self, tensor: Tensor) -> memoryview:
        return tensor_bytes(saturating_cast(device_flat(tensor), self._dtype).cpu())

    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        half = encoded.view(self._dtype)
        # bf16 reaches further than fp16: 65504 rounds up to 65536, which an fp16 tensor cannot hold.
        out.copy_(saturating_cast(half, out.dtype) if out.dtype == torch.float16 else half)


NONE = NoneCodec()
CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (NONE, HalfCodec("fp16", torch.float16), HalfCodec("bf16", torch.bfloat16))
}
"""Every codec by name."""


def codec(name: object) -> Codec:
    """The codec of this name. Raises `UnsupportedDtypeError`."""
    found = CODECS.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedDtypeError(
            f"The codec {str(name)[:60]!r} is unknown here.", fix=f"Use one of {', '.join(CODECS)}, or update swarm."
        )
    return found
