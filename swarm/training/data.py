"""`DataShard`: every trainer reads the same dataset in an order of its own, and can go on where it stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import IterableDataset, get_worker_info

from swarm.errors import UsageError

T_co = TypeVar("T_co", covariant=True)


class SizedDataset(Protocol[T_co]):
    """A map-style dataset: anything with a length and items 0 to length - 1."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


class NamedPeer(Protocol):
    """What a shard needs of a peer."""

    @property
    def run_id(self) -> bytes: ...

    @property
    def name(self) -> str: ...


class DataShard(IterableDataset[T_co]):
    """A stream over a map-style dataset, shuffled differently by every peer and in every epoch.

    The order depends on the seed (by default the run's id), the peer's name and the epoch only, so that a peer that
    restarts under its name can go on: save `state_dict` with your checkpoint. Each `iter` runs to the end of the epoch
    and the next one begins another. Workers of a `DataLoader` share an epoch between them; the position then lives in
    the workers, so count with `num_workers=0` if you resume within an epoch.

    Args:
        dataset: What to read; stays on this machine.
        peer: Whose shard this is; only its run id and name are kept, so that workers can be started.
        seed: Replaces the run's id, to repeat the same order in another run.

    Raises:
        UsageError: The dataset is empty.
    """

    def __init__(self, dataset: SizedDataset[T_co], peer: NamedPeer, seed: int | None = None) -> None:
        super().__init__()
        if len(dataset) == 0:
            raise UsageError("The dataset is empty.", fix="Pass one with at least one item.")
        self.dataset = dataset
        root = peer.run_id if seed is None else f"seed {seed}".encode()
        self._seed = hashlib.sha256(b"swarm/data/1\0" + root + b"\0" + peer.name.encode()).digest()
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Items of one epoch."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[T_co]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        order = self._order(self._epoch)
        if worker is not None:
            # A worker's copy lives for one epoch: the main process moves on.
            yield from (self.dataset[int(i)] for i in order[self._position + first :: stride])
            return
        if self._position >= len(order):
            self._epoch, self._position = self._epoch + 1, 0
            order = self._order(self._epoch)
        while self._position < len(order):
            index = int(order[self._position])
            self._position += 1
            yield self.dataset[index]
        self._epoch, self._position = self._epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: needed between epochs if a `DataLoader` reads through workers."""
        self._epoch, self._position = epoch, 0

    def _order(self, epoch: int) -> torch.Tensor:
        digest = hashlib.sha256(self._seed + epoch.to_bytes(8, "big")).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(len(self.dataset), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position of the next item, as plain values."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
