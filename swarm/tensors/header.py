"""The header of a tensor frame: packing it, and parsing one that a stranger sent, which may be wrong in every way."""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
import torch
from torch import Tensor

from swarm.errors import FrameTooLargeError, MalformedFrameError, UnsupportedDtypeError, WireError
from swarm.tensors.codecs import CODECS, Codec, codec
from swarm.tensors.schema import DTYPE_NAMES, DTYPES, MAX_DIMS, parse_dtype

MAGIC = b"SWT1"
PREFIX = struct.Struct("<4sI")
_MAX_ELEMENTS = 1 << 62
_MAX_CONTAINER = 16384
_FIELDS = 4

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("swarm's wire format needs a little-endian machine.")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a receiver accepts in one frame. Nothing is allocated beyond it."""

    max_header_bytes: int = 1 << 20
    """Size of the msgpack header. Parsing the worst header takes about 70 times as much memory for a moment."""
    max_tensors: int = 4096
    """Number of tensors."""
    max_payload_bytes: int = 1 << 30
    """All tensors together, both encoded and decoded."""


DEFAULT_LIMITS = Limits()


def pack_header(meta: dict[str, Any], tensors: Sequence[Tensor], codecs: Sequence[Codec]) -> tuple[bytes, int]:
    """Prefix and header as bytes, and the payload's size."""
    rows = []
    total = 0
    for tensor, with_codec in zip(tensors, codecs, strict=True):
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise UnsupportedDtypeError(
                "Only dense tensors that hold data can travel.", fix="Call `to_dense()` or materialise it."
            )
        dtype = tensor.dtype
        if not with_codec.carries(dtype):
            with_codec.check(dtype)
        nbytes = with_codec.encoded_nbytes(tensor.numel(), dtype)
        total += nbytes
        rows.append((DTYPE_NAMES[dtype], tuple(tensor.shape), with_codec.name, nbytes))
    try:
        header = msgpack.packb({"meta": meta, "tensors": rows})
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedFrameError(f"The metadata of a call cannot be encoded: {error}.") from error
    return PREFIX.pack(MAGIC, len(header)) + header, total


class TensorHeader:
    """One row of a checked header."""

    __slots__ = ("codec", "dtype", "name", "nbytes", "shape")

    @property
    def memory_bytes(self) -> int:
        """What it takes here: the larger of its encoded and its decoded size."""
        return max(self.nbytes, prod(self.shape) * self.dtype.itemsize)

    def __init__(self, dtype: torch.dtype, name: str, shape: tuple[int, ...], with_codec: Codec, nbytes: int) -> None:
        self.dtype = dtype
        self.name = name
        self.shape = shape
        self.codec = with_codec
        self.nbytes = nbytes


def _refuse_extension(kind: int, _: bytes) -> Any:
    raise MalformedFrameError(f"The header holds a msgpack extension (type {kind}); plain values are expected.")


def checked_numel(dims: Any) -> int:
    """Number of elements of a shape that a stranger sent. Raises `MalformedFrameError` unless it could exist."""
    if type(dims) is not list or len(dims) > MAX_DIMS:
        raise MalformedFrameError(f"A tensor's shape is not a list of at most {MAX_DIMS} sizes.")
    numel = 1
    extent = 1
    for size in dims:
        if type(size) is not int or size < 0:
            raise MalformedFrameError("A tensor's shape holds something else than sizes.")
        numel *= size
        if size > 1:
            extent *= size
            if extent > _MAX_ELEMENTS:
                raise MalformedFrameError("A tensor's shape has more elements than any memory.")
    return numel


def _parse_row(row: Any) -> tuple[TensorHeader, int]:
    """One checked row and its decoded size."""
    if type(row) is not list or len(row) != _FIELDS:
        raise MalformedFrameError("A tensor's header is not a list of dtype, shape, codec and size.")
    dtype_field, dims, codec_field, nbytes = row
    dtype = DTYPES.get(dtype_field) if type(dtype_field) is str else None
    if dtype is None:
        dtype = parse_dtype(dtype_field)
    with_codec = CODECS.get(codec_field) if type(codec_field) is str else None
    if with_codec is None:
        with_codec = codec(codec_field)
    if not with_codec.carries(dtype):
        with_codec.check(dtype)
    numel = checked_numel(dims)
    if type(nbytes) is not int or nbytes != with_codec.encoded_nbytes(numel, dtype):
        raise MalformedFrameError("A tensor's size in bytes does not belong to its shape, dtype and codec.")
    return TensorHeader(dtype, dtype_field, tuple(dims), with_codec, nbytes), numel * dtype.itemsize


def parse_header(data: memoryview, limits: Limits) -> tuple[dict[str, Any], list[TensorHeader]]:
    try:
        header = msgpack.unpackb(
            data,
            ext_hook=_refuse_extension,
            max_array_len=max(limits.max_tensors, _MAX_CONTAINER),
            max_map_len=_MAX_CONTAINER,
        )
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedFrameError(f"The header is not valid msgpack: {str(error)[:120]}.") from error
    if type(header) is not dict or header.keys() != {"meta", "tensors"}:
        raise MalformedFrameError("The header is not a map of `meta` and `tensors`.")
    meta, rows = header["meta"], header["tensors"]
    if type(meta) is not dict or type(rows) is not list:
        raise MalformedFrameError("`meta` is not a map or `tensors` is not a list.")
    if len(rows) > limits.max_tensors:
        raise FrameTooLargeError(f"{len(rows)} tensors in one frame; at most {limits.max_tensors} are accepted.")
    specs = []
    encoded = decoded = 0
    for row in rows:
        spec, nbytes = _parse_row(row)
        encoded += spec.nbytes
        decoded += nbytes
        if encoded > limits.max_payload_bytes or decoded > limits.max_payload_bytes:
            raise FrameTooLargeError(
                f"A frame announces {max(encoded, decoded)} bytes or more; at most {limits.max_payload_bytes} are "
                "accepted.",
                fix="Send less at once, or raise the receiver's limit.",
            )
        specs.append(spec)
    return meta, specs
