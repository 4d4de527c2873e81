"""Copies between the CPU and the device that computes: through pinned memory, on streams of their own.

On a CPU nothing is copied. On CUDA a copy from pageable memory would block its thread and wait for the kernels before
it; here the inputs of the next batch travel while the current one is computed, and the compute stream waits for them
with an event. Pinned buffers come from torch's caching allocator, which hands a buffer out again once its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors on their way to the device. `arrived` is none if they are there already."""

    tensors: list[Tensor]
    arrived: torch.cuda.Event | None = None

    def wait(self) -> list[Tensor]:
        """The tensors, for use on the current stream, which waits for them; the calling thread does not."""
        if self.arrived is not None:
            stream = torch.cuda.current_stream(self.tensors[0].device)
            stream.wait_event(self.arrived)
            for tensor in self.tensors:
                # their memory belongs to the copying stream; it must not be used again before we are done
                tensor.record_stream(stream)
        return self.tensors


class HostCopies:
    """See the module's docstring.

    Args:
        device: Where the work is computed.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # tensors know their device by number
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
        self._incoming = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]

    def to_device(self, tensors: Sequence[Tensor]) -> Arriving:
        """Begin to copy tensors to the device; those that are there stay as they are. From any thread.

        The copies wait for earlier copies only, not for what is computed.
        """
        stream = self._incoming
        if stream is None or all(t.device == self.device for t in tensors):
            return Arriving([t.to(self.device) for t in tensors])
        staged = [t if t.is_cuda or t.is_pinned() else _pinned_like(t).copy_(t) for t in tensors]
        with torch.cuda.stream(stream):
            copies = [t.to(self.device, non_blocking=True) for t in staged]
        return Arriving(copies, stream.record_event())

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Detached copies on the CPU (the tensors themselves, if they are there), complete on return."""
        stream = self._outgoing
        if stream is None:
            return [t.detach() if t.is_cpu else t.detach().cpu() for t in tensors]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        copies: list[Tensor] = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                source = tensor.detach()
                if source.is_cuda:
                    source.record_stream(stream)
                    copies.append(_pinned_like(source).copy_(source, non_blocking=True))
                else:
                    copies.append(source)
        stream.synchronize()
        return copies


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
