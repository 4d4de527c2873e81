"""What each expert of a host is used for: requests, tokens, batches, time, and how much is asked of it lately."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm.experts.batching import BatchKey, Work

_MEMORY_S = 30.0
"""Older requests hardly count in the rates: what is asked now is what placement and callers want to know."""


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """Totals of one expert since the host took it.

    Attributes:
        requests, tokens: Computed, forward and backward.
        batches: In how many computations.
        queue_s: Time that requests have waited, summed over requests.
        compute_s: Time of the device, summed over batches.
        tokens_per_s: Asked of it lately (a moving average over half a minute).
        steps: Optimizer steps that this host has made.
        pending_tokens: Gradients collected for the next step come from so many tokens.
    """

    requests: int = 0
    tokens: int = 0
    batches: int = 0
    queue_s: float = 0.0
    compute_s: float = 0.0
    tokens_per_s: float = 0.0
    steps: int = 0
    pending_tokens: int = 0

    @property
    def mean_batch(self) -> float:
        """Requests that were computed together, on average."""
        return self.requests / self.batches if self.batches else 0.0


class _Totals:
    __slots__ = ("batches", "compute_s", "queue_s", "rate", "requests", "seen_s", "tokens")

    def __init__(self, now_s: float) -> None:
        self.requests = self.tokens = self.batches = 0
        self.queue_s = self.compute_s = self.rate = 0.0
        self.seen_s = now_s

    def rate_at(self, now_s: float) -> float:
        return self.rate * math.exp((self.seen_s - now_s) / _MEMORY_S)


class Statistics:
    """Collects the use of a host's experts. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, _Totals] = {}

    def observe(self, batch: Sequence[Work], elapsed_s: float, now_s: float) -> None:
        """Note a batch that took `elapsed_s` and ended at `now_s`."""
        key = batch[0].key
        if not isinstance(key, BatchKey):
            return
        tokens, queue_s = 0, 0.0
        for work in batch:
            tokens += work.tokens
            queue_s += work.queue_s
        with self._lock:
            totals = self._totals.get(key.uid)
            if totals is None:
                totals = self._totals[key.uid] = _Totals(now_s)
            totals.requests += len(batch)
            totals.tokens += tokens
            totals.batches += 1
            totals.queue_s += queue_s
            totals.compute_s += elapsed_s
            totals.rate = totals.rate_at(now_s) + tokens / _MEMORY_S
            totals.seen_s = now_s

    def forget(self, uid: str) -> None:
        """The expert is no longer held."""
        with self._lock:
            self._totals.pop(uid, None)

    def busy(self, now_s: float) -> dict[str, int]:
        """Tokens a second asked of each expert lately; those that nobody uses are left out."""
        with self._lock:
            rates = {uid: round(totals.rate_at(now_s)) for uid, totals in self._totals.items()}
        return {uid: rate for uid, rate in rates.items() if rate}

    def use(self, uids: Iterable[str], now_s: float) -> dict[str, ExpertUse]:
        """The use of these experts, without what only their backends know (`steps`, `pending_tokens`)."""
        with self._lock:
            return {
                uid: ExpertUse(t.requests, t.tokens, t.batches, t.queue_s, t.compute_s, t.rate_at(now_s))
                if (t := self._totals.get(uid)) is not None
                else ExpertUse()
                for uid in uids
            }
