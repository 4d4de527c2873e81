"""What every codec is, and the views and casts of tensors that all of them need."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from swarm.errors import MalformedFrameError, UnsupportedDtypeError
from swarm.tensors.codecs.scratch import TILE_ELEMENTS
from swarm.tensors.memory import blank_bytes
from swarm.tensors.schema import is_finite

Rng = int | torch.Generator | None
"""Randomness of one encoding: a seed, a generator that gives one, or none for rounding to nearest."""

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What lossy codecs carry."""
_EMPTY = memoryview(b"")


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
    return saturating_copy(torch.empty_like(tensor, dtype=dtype), tensor)


def saturating_copy(out: Tensor, tensor: Tensor) -> Tensor:
    """The same into a tensor of the other dtype, which is returned."""
    out.copy_(tensor)
    limit = torch.finfo(out.dtype).max
    if torch.finfo(tensor.dtype).max <= limit or is_finite(out):
        return out
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    return out.copy_(torch.where(tensor.isinf(), out, wide.clamp(-limit, limit).to(out.dtype)))


class Codec(ABC):
    """One way to encode. Stateless and thread-safe.

    Equal arguments give equal bytes on one machine; every machine decodes the same bytes to the same values.

    Attributes:
        name: The name in headers and settings.
        unit_elements: Elements that are encoded together; only a tensor's last unit may be shorter. Encoding a tensor
            in pieces of whole units gives the bytes of encoding it at once (with a seed: of that seed per piece).
        is_copy: Encoding is copying the memory of the tensor.
    """

    name: str
    unit_elements: int = 1
    is_copy: bool = False

    @abstractmethod
    def carries(self, dtype: torch.dtype) -> bool:
        """Whether tensors of this dtype can be encoded."""

    @abstractmethod
    def exact(self, dtype: torch.dtype) -> bool:
        """Whether every value of this dtype survives unchanged, so that error feedback would hold nothing."""

    @abstractmethod
    def encoded_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact size of `numel` elements in bytes."""

    def encode(self, tensor: Tensor, *, rng: Rng = None) -> memoryview:
        """Encode any strided tensor, or a whole number of units of one (flat), on any device.

        Work happens where the tensor lives; only encoded bytes are copied from an accelerator.

        Args:
            rng: Makes rounding stochastic and thereby unbiased, where the codec can: use one seed per piece, since
                equal seeds give equal noise. A generator is drawn from once per call. None rounds to nearest.
        """
        flat = device_flat(tensor)
        out = torch.empty(self.encoded_nbytes(flat.numel(), flat.dtype), dtype=torch.uint8, device=flat.device)
        self.encode_into(flat, out, rng=rng)
        return tensor_bytes(out.cpu())

    def encode_bytes(self, tensor: Tensor, *, rng: Rng = None) -> bytes:
        """The same of a CPU tensor with at least one element, straight into what gRPC can send."""
        flat = device_flat(tensor)
        payload, memory = blank_bytes(self.encoded_nbytes(flat.numel(), flat.dtype))
        self.encode_into(flat, memory, rng=rng)
        return payload

    @abstractmethod
    def encode_into(self, flat: Tensor, out: Tensor, *, rng: Rng = None, tile: int = 0) -> None:
        """Encode a flat contiguous tensor (whole units, or the end of one) into bytes of the right size beside it.

        Args:
            rng: As for `encode`.
            tile: The number of the `spans` where `flat` begins, if it is part of what `rng` is the seed of.
        """

    def spans(self, numel: int, dtype: torch.dtype) -> Iterator[tuple[int, slice, slice]]:
        """Cut so many elements into tiles whose working memory stays in cache: number, elements, bytes of each."""
        for tile, start in enumerate(range(0, numel, TILE_ELEMENTS)):
            stop = min(start + TILE_ELEMENTS, numel)
            first = self.encoded_nbytes(start, dtype)
            yield tile, slice(start, stop), slice(first, first + self.encoded_nbytes(stop - start, dtype))

    def finite(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> bool | None:
        """Whether all of what the bytes (CPU, as for `decode_into`) decode to is finite; none: decode them to know.

        Raises:
            MalformedFrameError: Not the size of `numel` elements, or no encoder writes such bytes.
        """
        self.check_size(encoded.numel(), numel, dtype)
        elements = self.elements(encoded, dtype)
        return None if elements is None else is_finite(elements)

    @abstractmethod
    def decode_into(self, encoded: Tensor, out: Tensor) -> None:
        """Decode bytes (1-d uint8, CPU, whole units) into the flat tensor `out`.

        Raises:
            MalformedFrameError: Not the size of `out`, or no encoder writes such bytes. `out` is as it was.
        """

    @abstractmethod
    def decode_add(self, encoded: Tensor, dtype: torch.dtype, acc: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded values to a flat fp32 or fp64 tensor: what a reducer does, in fewer passes.

        Args:
            encoded: As for `decode_into`.
            dtype: Of the tensor that was encoded.

        Raises:
            MalformedFrameError: Not the size of `acc`, or no encoder writes such bytes. `acc` is as it was.
        """

    def elements(self, encoded: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Encoded bytes (of whole elements, of the right size) as a view of elements that `copy_` alone decodes.

        None where it takes more than that.
        """
        return None

    def decode(self, buffer: bytes | bytearray | memoryview, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode a whole tensor into memory of its own.

        Raises:
            UnsupportedDtypeError: The codec cannot carry this dtype.
            MalformedFrameError: The buffer has another size than the shape requires, or no encoder writes such bytes.
        """
        self.check(dtype)
        self.check_size(len(buffer), math.prod(shape), dtype)
        staged = torch.empty(len(buffer), dtype=torch.uint8)
        if len(buffer):
            tensor_bytes(staged)[:] = memoryview(buffer).cast("B")
        out = torch.empty(tuple(shape), dtype=dtype)
        self.decode_into(staged, out.view(-1))
        return out

    def check_size(self, nbytes: int, numel: int, dtype: torch.dtype) -> None:
        """Raise `MalformedFrameError` unless so many elements are encoded in so many bytes."""
        needed = self.encoded_nbytes(numel, dtype)
        if nbytes != needed:
            raise MalformedFrameError(f"{nbytes} bytes where codec {self.name} needs {needed} for {numel} elements.")

    def check(self, dtype: torch.dtype) -> None:
        """Raise `UnsupportedDtypeError` unless this codec carries the dtype."""
        if not self.carries(dtype):
            raise UnsupportedDtypeError(
                f"Codec {self.name} cannot carry {str(dtype).removeprefix('torch.')}.", fix='Use codec "none" for it.'
            )
