"""Copies between the CPU and CUDA devices: many at a time, through pinned memory, on a stream of their own.

A copy to or from pageable memory blocks the thread and goes through a bounce buffer, once for every tensor. Here all
copies of a batch are queued on a side stream, beside what the device computes, and waited for once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy every (target, source), like `target.copy_(source)`; complete on return, for the host and for the device.

    Tensors may have any dtypes, and live on the CPU or on any CUDA devices. Copies between a device and pinned memory
    overlap with each other and with the device's work that was queued by other streams; work that was queued on the
    current stream is seen, and what is queued there later sees the copies.
    """
    used: dict[torch.device, torch.cuda.Stream] = {}
    with torch.no_grad():
        for target, source in pairs:
            source = source.detach()
            device = next((t.device for t in (target, source) if t.is_cuda), None)
            if device is None:
                target.copy_(source)
                continue
            stream = used.get(device) or used.setdefault(device, _begin(device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    for device, stream in used.items():
        torch.cuda.current_stream(device).wait_stream(stream)
        stream.synchronize()


def add_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """`target.add_(change)` for every (target, change), under `no_grad`; the changes may be on the CPU.

    On return the changes may be written again.
    """
    used: dict[torch.device, torch.cuda.Stream] = {}
    with torch.no_grad():
        for target, change in pairs:
            target.add_(change.to(target.device, non_blocking=True))
            if target.is_cuda and target.device not in used:
                used[target.device] = torch.cuda.current_stream(target.device)
    for stream in used.values():
        stream.synchronize()


def _begin(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a device, behind what the current stream has queued."""
    stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
