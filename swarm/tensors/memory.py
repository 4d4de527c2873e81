"""Memory for large tensors. First touches of fresh memory cost more than the copy into it, unless pages are huge.

Filling 64 MiB of fresh memory took 25 ms with pages of 4 KiB and 4 ms with huge ones (the copy alone: 3 ms). The chunks
that travel between large tensors are allocated and freed by the thousand: see `keep_freed_memory`.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_WORTHWHILE_BYTES = 2 * HUGE_PAGE_BYTES
_LARGEST_KEPT_BYTES = (32 << 20) - (64 << 10)
"""Just under the largest block that glibc's malloc learns from."""


@lru_cache(maxsize=1)
def _madvise() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = getattr(ctypes.CDLL(None), "madvise", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Once per process: let glibc's malloc keep up to 64 MiB of freed memory that it would return to the system.

    It follows the largest block freed so far (up to 32 MiB), unless somebody has set its thresholds. Until then every
    chunk of a megabyte is fresh memory again, at the price of thousands of page faults in an all-reduce. Elsewhere
    this has no effect.
    """
    torch.empty(_LARGEST_KEPT_BYTES, dtype=torch.uint8)  # freed at once, never touched


def allocate(nbytes: int, pinned: bool = False) -> Tensor:
    """Uninitialised CPU memory as a 1-d uint8 tensor, aligned for every dtype, on huge pages where Linux allows it.

    Args:
        nbytes: Its size.
        pinned: Take page-locked memory instead, from and to which a CUDA device copies by itself.
    """
    if pinned:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if nbytes >= _WORTHWHILE_BYTES:
        keep_freed_memory()
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if nbytes >= _WORTHWHILE_BYTES and (madvise := _madvise()) is not None:
        start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (memory.data_ptr() + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if end > start:
            madvise(start, end - start, mmap.MADV_HUGEPAGE)  # only advice: a refusal changes nothing
    return memory


def peek(payload: bytes) -> Tensor:
    """The payload's own memory as a 1-d uint8 tensor: only for reading, and only while the payload is held.

    torch takes no read-only buffers without a warning, and a copy of every chunk costs as much as its conversion.
    """
    pointer = ctypes.cast(ctypes.c_char_p(payload), ctypes.POINTER(ctypes.c_uint8))
    return torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(len(payload),)))


def blank_bytes(nbytes: int) -> tuple[bytes, Tensor]:
    """New `bytes` of at least one byte, uninitialised, and their memory to be filled before anybody else sees them.

    gRPC sends `bytes` only; to encode elsewhere and copy costs as much again as encoding.
    """
    assert nbytes > 0
    payload = _new_bytes()(None, nbytes)
    return payload, peek(payload)


@lru_cache(maxsize=1)
def _new_bytes() -> Callable[[None, int], bytes]:
    function = ctypes.pythonapi.PyBytes_FromStringAndSize
    function.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
    function.restype = ctypes.py_object
    return function
