"""Gossip: rounds with one other peer or a few, and no global step. What can be chosen, and who meets whom, without I/O.

*Pairwise* (`Gossip`): a pair is a sealed group of two, and its exchange the butterfly of two: each reduces one half and
gets the other back, so that both hold the same bits, and half as much travels as if they swapped whole vectors.
*Push-sum* (`PushSum`): a peer gives away shares of what it holds and waits for nobody; see `swarm.averaging.pushsum`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swarm.averaging.allreduce import AllReduce, check_codec
from swarm.averaging.pushsum import MAX_OPEN
from swarm.errors import UsageError
from swarm.identity import PeerId
from swarm.tensors.codecs import Role

Partners = Literal["random", "hops"]

MAX_TURN_AHEAD = 1 << 20
"""Nobody is believed to have made so many more rounds than we have."""


@dataclass(frozen=True, slots=True)
class Gossip:
    """Strategy: average with one other peer at a time; who finds no partner in time skips the round.

    Peers that know the same others and are in the same turn agree on random disjoint pairs without a word; whoever's
    partner does not come takes anybody who is free. Each round halves the variance between peers on average.

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


@dataclass(frozen=True, slots=True)
class PushSum:
    """Strategy: give shares of the values to other peers and add what arrived, without waiting for anybody.

    (Stochastic gradient push.) A step takes in the shares that came since the last one, sets out `peers` new ones in
    the background, and is over. All peers converge to the mean of their values weighted alike, however often each of
    them steps; `Averager.step` takes no other weight than 1. Others must be able to reach this peer.

    Memory, besides the tensors: a copy of them, an fp32 copy for what arrives, the encoded values until the last of
    their shares has been taken (a few of those if receivers are slow), and the encoded shares that arrive (at most 4 at
    a time).

    Attributes:
        codec: How shares travel; what a lossy one leaves out stays with the sender.
        partners: `random`: to anybody. `hops`: to the peers 1, 2, 4, ... places further in the ring of ids, in turn,
            which mixes faster where all know each other and step alike.
        peers: Shares per step.
    """

    codec: str = "none"
    partners: Partners = "random"
    peers: int = 1

    def __post_init__(self) -> None:
        check_codec(self.codec, self.role)
        if self.partners not in ("random", "hops"):
            raise UsageError(f"There is no choice of partners {self.partners!r}.", fix='Use "random" or "hops".')
        if not 1 <= self.peers <= MAX_OPEN:
            raise UsageError(f"A step cannot send {self.peers} shares.", fix=f"Use 1 to {MAX_OPEN}.")

    @property
    def role(self) -> Role:
        return "parameters"

    @property
    def error_feedback(self) -> bool:
        """Never: the sender's own values keep what a share leaves out."""
        return False


Strategy = AllReduce | Gossip | PushSum
"""Everything that an `Averager` can do in a round."""


# Pairs ---------------------------------------------------------------------------------------------------------------


def partner_of(me: PeerId, others: Sequence[PeerId], key: str, turn: int) -> PeerId | None:
    """Whom `me` pairs with in this turn: random disjoint pairs, the same for all who know the same peers.

    None for the one who is left over.
    """
    seed = f"swarm/averaging/pairs/1\0{turn}\0{key}".encode()

    def place(peer: PeerId) -> bytes:
        return hashlib.blake2b(peer.digest, digest_size=16, key=hashlib.sha256(seed).digest()).digest()

    order = sorted(dict.fromkeys([me, *others]), key=place)
    mate = order.index(me) ^ 1
    return order[mate] if mate < len(order) else None


class Pairing:
    """Which turn of pairing a peer is in, under one key. Turns are counted without a clock: the highest number counts.

    Attributes:
        turn: The present turn.
    """

    def __init__(self, key: str, me: PeerId) -> None:
        self.turn = 0
        self._key = key
        self._me = me
        self._known: tuple[int, tuple[PeerId, ...]] = (-1, ())
        self._partner: PeerId | None = None

    def saw(self, turn: int) -> None:
        """Another peer is in this turn."""
        if self.turn < turn < self.turn + MAX_TURN_AHEAD:
            self.turn = turn

    def advance(self) -> None:
        """A round ended, with or without a partner."""
        self.turn += 1

    def partner(self, others: Sequence[PeerId]) -> PeerId | None:
        """With whom to pair in this turn, if all know the same peers."""
        known = (self.turn, tuple(others))
        if self._known != known:
            self._known, self._partner = known, partner_of(self._me, others, self._key, self.turn)
        return self._partner


# Push-sum ------------------------------------------------------------------------------------------------------------


def push_targets(
    partners: Partners, me: PeerId, others: Sequence[PeerId], step: int, count: int, rng: random.Random
) -> list[PeerId]:
    """To whom `me` sends its shares in this step: at most `count` different peers."""
    if not others:
        return []
    if partners == "random":
        return rng.sample(sorted(others), min(count, len(others)))
    ring = sorted(dict.fromkeys([me, *others]))
    hops = max(1, (len(ring) - 1).bit_length())
    at = ring.index(me)
    chosen = (ring[(at + (1 << (step * count + index) % hops)) % len(ring)] for index in range(count))
    return [peer for peer in dict.fromkeys(chosen) if peer != me]
