"""What one caller may take of a host: bytes of requests on their way, and weight of its gradients. No I/O.

Both are judged against what others do at the time, so that a host with one caller serves it with all that it has.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Self

from swarm.errors import HostBusyError
from swarm.identity import PeerId

_SMOOTHING = 0.2
_MAX_TRAINERS = 256
_SILENCE = 64


class InflightBudget:
    """Bounds the memory of requests from the moment that their size is announced until they are answered.

    A peer may hold everything while no other holds anything, and half of it beside others. What a peer holds beyond
    half never keeps others out, so that all requests together take at most one and a half times the budget, or one
    request of any size and half of the budget.

    Args:
        max_bytes: The budget.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_peer: dict[PeerId, int] = {}
        self.held_bytes = 0

    def hold(self, peer: PeerId) -> Hold:
        """Reserve with the context's value, which is called with numbers of bytes; released when the block ends.

        It raises `HostBusyError` when too much is held already; alone, a request of any size is admitted.
        """
        return Hold(self, peer)

    def _change(self, peer: PeerId, nbytes: int) -> None:
        self.held_bytes += nbytes
        held = self._by_peer.pop(peer, 0) + nbytes
        if held:
            self._by_peer[peer] = held

    def _check(self, peer: PeerId, nbytes: int) -> None:
        if not self.held_bytes:
            return
        half = self._max_bytes // 2
        mine = self._by_peer.get(peer, 0)
        others = sum(min(held, half) for other, held in self._by_peer.items() if other != peer)
        if mine + nbytes > (half if others else self._max_bytes) or others + mine + nbytes > self._max_bytes:
            raise HostBusyError(
                f"Requests of {self.held_bytes} bytes are on their way, {mine} of them yours; {nbytes} more would be "
                "too much.",
                fix="Retry later, or ask another replica.",
            )


class Hold:
    """What one request holds of a budget."""

    __slots__ = ("_budget", "_nbytes", "_peer")

    def __init__(self, budget: InflightBudget, peer: PeerId) -> None:
        self._budget = budget
        self._peer = peer
        self._nbytes = 0

    def __enter__(self) -> Self:
        return self

    def __call__(self, nbytes: int) -> None:
        self._budget._check(self._peer, nbytes)
        self._budget._change(self._peer, nbytes)
        self._nbytes += nbytes

    def __exit__(self, *error: object) -> None:
        self._budget._change(self._peer, -self._nbytes)
        self._nbytes = 0


class GradientLimits:
    """Bounds the gradients of each trainer of one expert by what is usual among its trainers.

    Compared are norms over the square root of the tokens, which is what the norm of a sum of unrelated gradients grows
    with. Of every trainer a running geometric mean is kept; the limit is `ratio` times the (lower) median over
    trainers, and what is larger is scaled down to it. With two trainers the smaller one is the measure: a liar can slow
    the other one down, but not wreck the expert. A trainer alone has no limit. A majority of liars sets the measure.

    Args:
        ratio: How often the median a trainer may exceed.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        # the mean, and the number of the last gradient; least recently seen first
        self._logs: OrderedDict[PeerId, tuple[float, int]] = OrderedDict()
        self._seen = 0

    def factor(self, peer: PeerId, tokens: int, norm: float) -> float:
        """What to multiply a gradient with: 1 or less. Notes its norm, unlimited.

        Args:
            tokens: How many tokens it comes from.
            norm: Its finite 2-norm.
        """
        if norm <= 0.0 or tokens <= 0:
            return 1.0
        log = math.log(norm) - 0.5 * math.log(tokens)
        self._seen += 1
        before = self._logs[peer][0] if peer in self._logs else log
        self._logs[peer] = before + (log - before) * _SMOOTHING, self._seen
        self._logs.move_to_end(peer)
        while len(self._logs) > _MAX_TRAINERS or self._silent(next(iter(self._logs.values()))[1]):
            self._logs.popitem(last=False)
        if len(self._logs) == 1:
            return 1.0
        usual = sorted(mean for mean, _ in self._logs.values())[(len(self._logs) - 1) // 2]
        return min(1.0, math.exp(usual + math.log(self._ratio) - log))

    def _silent(self, number: int) -> bool:
        """Whether a trainer has sent nothing for so long that its norms are those of another phase of training."""
        return self._seen - number > _SILENCE * len(self._logs)
