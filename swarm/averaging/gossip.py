"""Pairwise gossip: a round averages with one other peer, picked at random, and needs no global step.

A pair is a sealed group of two, and its exchange the butterfly of two: each reduces one half and gets the other back,
so that both hold the same bits, and half as much travels as if they swapped whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.averaging.allreduce import AllReduce, check_codec
from swarm.tensors.codecs import Role


@dataclass(frozen=True, slots=True)
class Gossip:
    """Strategy: average with one random peer; who finds no partner in time skips the round.

    Attributes:
        codec, role, error_feedback: As for `AllReduce`.
    """

    codec: str = "none"
    role: Role = "parameters"
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        check_codec(self.codec, self.role)

    @property
    def min_group(self) -> int:
        return 2

    @property
    def max_group(self) -> int:
        return 2


Strategy = AllReduce | Gossip
"""Everything that an `Averager` can do in a round."""
