"""Dynamic batching of expert work.

`Batcher` is a queue without I/O: work of one key (expert, direction, shapes) is taken together up to a token budget,
the key of the oldest work first; what was cancelled or has expired is dropped when its turn comes; a full queue
refuses. It never waits for more work: a batch grows only while the device is busy.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swarm.errors import HostBusyError

_SMOOTHING = 0.2


@dataclass(eq=False, slots=True)
class Work:
    """One request's work for one expert.

    Attributes:
        key: Work of equal keys may be computed together.
        tokens: Its size.
        expires_s: It is dropped if it has not begun by then (the peer's monotonic time).
        job: What the `compute` function of the worker understands.
        future: Resolves to whatever `compute` returned for this job; cancel it to withdraw the work.
        caller: Who asked; the queue is shared out among callers.
        number: How many were queued before it.
        queued_s, queue_s, compute_s: When it was queued; how long it waited; how long its batch took.
    """

    key: Hashable
    tokens: int
    expires_s: float
    job: Any
    future: asyncio.Future[Any]
    caller: Hashable = None
    number: int = 0
    queued_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0


class BatchKey(NamedTuple):
    """Work of one key may be computed together."""

    uid: str
    direction: str
    train: bool
    grad_scale: float
    trailing: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class BatcherStats:
    """Totals since the start."""

    batches: int = 0
    batched: int = 0
    tokens: int = 0
    refused: int = 0
    cancelled: int = 0
    expired: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class Batch:
    """What to compute next, and what expired in the meantime."""

    work: list[Work] = field(default_factory=list)
    expired: list[Work] = field(default_factory=list)


Observe = Callable[[Sequence[Work], float, float], None]


class Batcher:
    """The queue of one device. No I/O, no locks: the caller serialises access.

    Work waits only for older work and for the batch that is being computed, whatever is asked of other experts.

    A caller may have as much waiting as is still free (the dynamic thresholds of Choudhury and Hahne 1998): one alone
    fills half of the queue, two fill two thirds, and whoever comes next finds room.

    Args:
        max_batch_tokens: Token budget of one batch; larger work is computed alone.
        max_queued_tokens: Tokens that may wait.
        observe: Told of every batch that was computed: its work, the seconds it took, and when it ended.
    """

    def __init__(self, max_batch_tokens: int, max_queued_tokens: int, observe: Observe | None = None) -> None:
        self._observe = observe
        self._max_batch_tokens = max_batch_tokens
        self._max_queued_tokens = max_queued_tokens
        self._queues: dict[Hashable, deque[Work]] = {}
        # one entry for every key that has work: the number of its oldest
        self._oldest: list[tuple[int, Hashable]] = []
        self._by_caller: dict[Hashable, int] = {}
        self._pushed = 0
        self._tokens_per_s = 0.0
        self.queued_tokens = 0
        self.stats = BatcherStats()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, work: Work, now_s: float) -> None:
        """Queue work. Raises `HostBusyError` when too much waits already (an empty queue takes work of any size)."""
        mine = self._by_caller.get(work.caller, 0)
        if self.queued_tokens and mine + work.tokens > self._max_queued_tokens - self.queued_tokens:
            self.stats.refused += 1
            raise HostBusyError(
                f"{self.queued_tokens} tokens wait already, {mine} of them yours.",
                fix="Retry later, or ask another replica.",
            )
        work.queued_s = now_s
        self.queued_tokens += work.tokens
        self._by_caller[work.caller] = mine + work.tokens
        work.number = self._pushed
        self._pushed += 1
        waiting = self._queues.get(work.key)
        if waiting is None:
            self._queues[work.key] = deque((work,))
            heapq.heappush(self._oldest, (work.number, work.key))
        else:
            waiting.append(work)

    def pop(self, now_s: float) -> Batch:
        """The next batch; empty when nothing waits."""
        batch = Batch()
        while self._oldest and not batch.work:
            _, key = heapq.heappop(self._oldest)
            waiting = self._queues[key]
            budget = self._max_batch_tokens
            while waiting and (not batch.work or waiting[0].tokens <= budget):
                work = waiting.popleft()
                self._leaves(work)
                work.queue_s = now_s - work.queued_s
                if work.future.cancelled():
                    self.stats.cancelled += 1
                elif now_s >= work.expires_s:
                    self.stats.expired += 1
                    batch.expired.append(work)
                else:
                    budget -= work.tokens
                    batch.work.append(work)
            if waiting:
                heapq.heappush(self._oldest, (waiting[0].number, key))
            else:
                del self._queues[key]
        return batch

    def _leaves(self, work: Work) -> None:
        self.queued_tokens -= work.tokens
        left = self._by_caller[work.caller] - work.tokens
        if left:
            self._by_caller[work.caller] = left
        else:
            del self._by_caller[work.caller]

    def done(self, batch: Sequence[Work], elapsed_s: float, now_s: float = 0.0) -> None:
        """Learn how fast the device is from a batch that ended at `now_s`."""
        tokens = batch[0].tokens if len(batch) == 1 else sum(w.tokens for w in batch)
        self.stats.batches += 1
        self.stats.batched += len(batch)
        self.stats.tokens += tokens
        self.stats.busy_s += elapsed_s
        if elapsed_s > 0:
            rate = tokens / elapsed_s
            self._tokens_per_s += (rate - self._tokens_per_s) * (_SMOOTHING if self._tokens_per_s else 1.0)
        if self._observe is not None:
            self._observe(batch, elapsed_s, now_s)

    @property
    def tokens_per_s(self) -> float:
        """How fast the device computes while it has work; 0 until that is known."""
        return self._tokens_per_s

    @property
    def expected_wait_s(self) -> float:
        """How long new work would wait."""
        return self.queued_tokens / self._tokens_per_s if self._tokens_per_s > 0 else 0.0
