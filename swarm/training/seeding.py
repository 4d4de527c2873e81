"""Weights with a defined start: trainers of one run that start together begin with the same trunk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class RunPeer(Protocol):
    """What seeding needs of a peer."""

    @property
    def run_id(self) -> bytes: ...


@contextmanager
def seeded(peer: RunPeer, name: str = "trunk") -> Iterator[None]:
    """Build a model inside, and its initial weights depend on the run alone; torch's own random state is kept.

        with swarm.training.seeded(peer):
            model = MyModel()

    `attach` replaces these weights where it finds newer state of the run.

    Args:
        name: Tells several models of one run apart.
    """
    digest = hashlib.sha256(b"swarm/seed/1\0" + name.encode() + b"\0" + peer.run_id).digest()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        yield
