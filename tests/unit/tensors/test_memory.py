"""Large memory is ordinary memory."""

from __future__ import annotations

import pytest
import torch

from swarm.tensors import memory
from swarm.tensors.memory import HUGE_PAGE_BYTES, allocate


@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 17])
def test_memory_is_writable_from_end_to_end(nbytes: int) -> None:
    buffer = allocate(nbytes)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == (nbytes,)
    buffer.fill_(3)
    assert int(buffer.sum()) == 3 * nbytes
    assert buffer.data_ptr() % 16 == 0


def test_advice_stays_inside_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def madvise(start: int, size: int, _: int) -> int:
        calls.append((start, size))
        return -1

    monkeypatch.setattr(memory, "_madvise", lambda: madvise)
    buffer = allocate(5 * HUGE_PAGE_BYTES + 17)
    allocate(HUGE_PAGE_BYTES)
    if calls:  # none where the platform lacks it
        [(start, size)] = calls
        assert start >= buffer.data_ptr()
        assert start + size <= buffer.data_ptr() + buffer.numel()
        assert start % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert allocate(5 * HUGE_PAGE_BYTES).numel() == 5 * HUGE_PAGE_BYTES


def test_freed_memory_is_kept_once_there_is_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: calls.append(None))
    allocate(HUGE_PAGE_BYTES)
    assert not calls  # small tensors cost nothing
    allocate(5 * HUGE_PAGE_BYTES)
    assert len(calls) == 1
