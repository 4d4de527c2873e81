"""Who meets whom when more peers average than a group holds: cells of a grid (Moshpit), without I/O.

Peers of one cell form groups of up to M. There are K cells, about N / M of them, and after every round the members of a
group move to different cells by their rank in the seal: from cell c to (c M + digit) mod K, the generalised de Bruijn
graph of degree M. That is the shift of digits of a grid [Ryabinin 2021, Moshpit All-Reduce]: with N = M^d peers, K =
M^(d - 1) and full groups, everybody holds the exact mean after d rounds, for each round averages over another digit.
Any other N, incomplete groups and lost rounds only make the error shrink geometrically instead.
"""

from __future__ import annotations

import hashlib
import random


def cell_count(population: int, max_group: int) -> int:
    """How many cells `population` peers use: at least population / max_group, one if a single group holds them all.

    Of four steps to a doubling (1 2 3 4 5 6 7 8 10 12 14 16 20 ...), so that peers whose counts differ a little mostly
    agree, and cells are more than three quarters full on average.
    """
    least = -(-population // max_group)
    if least <= 8:
        return max(1, least)
    step = 1 << (least.bit_length() - 3)
    if least == step * 4:
        return least
    return -(-least // step) * step


class Grid:
    """One peer's place. The place is a number in [0, 1), so that it stays meaningful when the number of cells changes.

    Args:
        max_group: M, the most members of a group.
        rng: For the place where a peer starts, and for what the cells do not decide.
    """

    def __init__(self, max_group: int, rng: random.Random) -> None:
        self.max_group = max_group
        self._rng = rng
        self._place = rng.random()
        self._cells = 1

    @property
    def index(self) -> int:
        """Which cell this peer is in."""
        return min(int(self._place * self._cells), self._cells - 1)

    def cell(self, population: int) -> str:
        """Name of the cell to meet others in, with this many peers in all; empty where one group holds everybody."""
        self._cells = cell_count(population, self.max_group)
        return "" if self._cells == 1 else f"{self._cells}.{self.index}"

    def advance(self, rank: int, nonce: bytes) -> None:
        """Move on after a round with this rank in its seal, away from the other members.

        The nonce, equal for all members, decides which digit the first rank takes: ranks go by priority, and cells
        would otherwise sort the peers.
        """
        first = int.from_bytes(hashlib.sha256(b"swarm/averaging/grid/1\0" + nonce).digest()[:8], "big")
        if self._cells <= self.max_group:
            index = (first + rank) % self._cells
        else:
            index = (self.index * self.max_group + (first + rank) % self.max_group) % self._cells
        self._place = (index + self._rng.random()) / self._cells

    def scatter(self) -> None:
        """Go anywhere: nobody was in the cell, so that others may be few or count differently."""
        self._place = self._rng.random()
