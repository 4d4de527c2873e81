"""Whether tensors can be written in place, element by element: none of their elements may share memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shares_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether two elements, of one tensor or of two, lie in the same memory, as after `expand` or with tied weights.

    Args:
        tensors: Dense tensors on any devices.
    """
    spans = sorted(
        ((*_span(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel()),
        key=lambda span: span[:3],
    )
    cluster: list[Tensor] = []
    device, end = "", 0
    for where, start, stop, index in spans:
        if where != device or start >= end:
            if _overlap(cluster):
                return True
            cluster, device, end = [], where, stop
        cluster.append(tensors[index])
        end = max(end, stop)
    return _overlap(cluster)


def _span(tensor: Tensor) -> tuple[str, int, int]:
    """Device, first byte and end of the memory that a tensor reaches over."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


def _overlap(cluster: Sequence[Tensor]) -> bool:
    """Whether tensors that reach over the same memory meet in some element."""
    if not cluster or (len(cluster) == 1 and _is_plain(cluster[0])):
        return False
    total = sum(tensor.numel() * tensor.element_size() for tensor in cluster)
    base = min(tensor.data_ptr() for tensor in cluster)
    end = max(_span(tensor)[2] for tensor in cluster)
    if total > end - base:
        return True  # more bytes than there is room for
    touched = torch.zeros(end - base, dtype=torch.bool)
    for tensor in cluster:
        size = tensor.element_size()
        shape, strides = (*tensor.shape, size), (*(s * size for s in tensor.stride()), 1)
        touched.as_strided(shape, strides, tensor.data_ptr() - base).fill_(True)
    return int(touched.sum()) != total


def _is_plain(tensor: Tensor) -> bool:
    """Whether each dimension steps over all that the smaller steps reach; torch makes hardly any other layout."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
