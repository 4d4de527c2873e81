"""Runs batches of expert work on a device, one at a time.

`DeviceWorker` computes on a thread of its own, `InlineWorker` on the event loop in virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from swarm.clock import Clock
from swarm.errors import ClosedError, ExpertFailedError, HostBusyError
from swarm.experts.batching import Batch, Batcher, Work
from swarm.runtime import Runtime

T = TypeVar("T")
_TINY_S = 2e-4
_TRUST_AFTER = 8
_FADING = 0.5
_MAX_COSTS = 1024

Prepare = Callable[[Sequence[Work]], None]
"""Begins to copy what a batch needs to the device, while the batch before is computed."""
Compute = Callable[[Sequence[Work]], Sequence[Any]]
"""Computes a batch of equal keys; returns one result per work (an exception as a value is a result like any other)."""


class Worker(Protocol):
    """Runs batches and other functions on a device, one at a time. Used from the event loop."""

    batcher: Batcher

    def submit(self, work: Work) -> None:
        """Queue work; its future resolves on the loop. Raises `HostBusyError`, `ClosedError`."""
        ...

    async def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the device's thread, between batches. Raises what `fn` raises, or `ClosedError`."""
        ...

    async def close(self) -> None:
        """Drop what waits and end the thread, after the batch that it computes. Idempotent."""
        ...


def _computed(compute: Compute, batch: Sequence[Work]) -> Sequence[Any]:
    """Results of a batch; a bug in the computation fails its requests, not the worker."""
    try:
        return compute(batch)
    except Exception as error:  # noqa: BLE001 - becomes each request's typed failure
        failure = ExpertFailedError(f"The batch failed: {type(error).__name__}: {str(error)[:300]}")
        failure.__cause__ = error
        return [failure] * len(batch)


class _Cost:
    """How long batches of one key have taken lately; pessimistic, since it decides what may hold up the loop.

    A slow batch halves its weight with each one that follows: on a busy machine any batch is interrupted now and then,
    which must not send the next hundred over the two thread switches.
    """

    __slots__ = ("seconds", "times", "tokens")

    def __init__(self) -> None:
        self.seconds, self.tokens, self.times = 0.0, 0, 0

    def learn(self, tokens: int, seconds: float) -> None:
        self.seconds = max(seconds, self.seconds * _FADING)
        self.tokens = max(self.tokens, tokens)
        self.times += 1

    def tiny(self, tokens: int) -> bool:
        return self.times >= _TRUST_AFTER and tokens <= self.tokens and self.seconds < _TINY_S


def _resolve(work: Work, result: Any) -> None:
    if not work.future.done():
        work.future.set_result(result)


def _expire(batch: Batch) -> None:
    for work in batch.expired:
        _resolve(work, HostBusyError("The request waited longer than its caller would.", fix="Retry later."))


class DeviceWorker:
    """A worker with a thread of its own.

    While the device is idle, work that is known to take less than the two thread switches would (a few experts only:
    tiny ones) is computed on the event loop. torch's number of intra-op threads belongs to the process; it is left as
    it is.

    Args:
        prepare: Runs on a second thread, one batch ahead; for devices to which copies take time.
    """

    def __init__(
        self,
        batcher: Batcher,
        compute: Compute,
        clock: Clock,
        name: str = "swarm-device",
        prepare: Prepare | None = None,
    ) -> None:
        self.batcher = batcher
        self._compute = compute
        self._prepare = prepare
        self._ready: queue.SimpleQueue[Callable[[], None] | Batch | None] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(1)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._device = threading.Lock()
        self._costs: dict[Hashable, _Cost] = {}
        # A SimpleQueue wakes its reader several times faster than a Condition; an item is a function, or "look into
        # the batcher", of which there is one for every work.
        self._wake: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._threads = [self._thread]
        if prepare is not None:
            self._threads.append(threading.Thread(target=self._run_ahead, name=f"{name}-copies", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        if self._closed:
            raise ClosedError("The host is closed.")
        cost = self._costs.get(work.key)
        if cost is not None and cost.tiny(work.tokens) and self._device.acquire(blocking=False):
            try:
                if not self.batcher.queued_tokens:
                    self._compute_now(work)
                    return
            finally:
                self._device.release()
        with self._lock:
            self.batcher.push(work, self._clock.time())
        self._wake.put(None)

    def _compute_now(self, work: Work) -> None:
        batch = Batch([work])
        _deliver(batch, self._timed(batch))

    def _timed(self, batch: Batch) -> Sequence[Any]:
        begun_s = self._clock.time()
        results = _computed(self._compute, batch.work)
        now_s = self._clock.time()
        elapsed_s = now_s - begun_s
        with self._lock:
            self.batcher.done(batch.work, elapsed_s, now_s)
        for work in batch.work:
            work.compute_s = elapsed_s
        if len(self._costs) > _MAX_COSTS:
            self._costs.clear()
        cost = self._costs.get(batch.work[0].key)
        if cost is None:
            cost = self._costs[batch.work[0].key] = _Cost()
        cost.learn(sum(w.tokens for w in batch.work), elapsed_s)
        return results

    async def call(self, fn: Callable[[], T]) -> T:
        if self._closed:
            raise ClosedError("The host is closed.")
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                if self._closed:
                    raise ClosedError("The host is closed.")  # noqa: TRY301 - same way out as any failure
                result = fn()
            except BaseException as error:  # noqa: BLE001 - raised again where the caller awaits it
                self._loop.call_soon_threadsafe(_set_exception, future, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, future, result)

        self._wake.put(run)
        return await future

    def _run(self) -> None:
        if self._prepare is not None:
            self._run_prepared()
            return
        while True:
            run = self._wake.get()
            if run is not None:
                with self._device:
                    run()
                continue
            if self._closed:
                break
            with self._device:
                batch = self._next()
                results = self._timed(batch) if batch.work else ()
            self._answer(batch, results)
        self._end_calls()

    def _run_ahead(self) -> None:
        """Take functions and batches from the queue for the device's thread, at most one batch ahead of it."""
        assert self._prepare is not None
        while True:
            run = self._wake.get()
            if run is not None:
                self._ready.put(run)
                continue
            if self._closed:
                break
            self._ahead.acquire()
            batch = self._next()
            if batch.work:
                # out of memory, say: computing copies what is not there, and reports what fails then
                with contextlib.suppress(RuntimeError):
                    self._prepare(batch.work)
            self._ready.put(batch)
        self._end_calls()
        self._ready.put(None)

    def _run_prepared(self) -> None:
        while (item := self._ready.get()) is not None:
            if not isinstance(item, Batch):
                with self._device:
                    item()
                continue
            self._ahead.release()
            with self._device:
                results = self._timed(item) if item.work else ()
            self._answer(item, results)

    def _next(self) -> Batch:
        with self._lock:
            return self.batcher.pop(self._clock.time())

    def _answer(self, batch: Batch, results: Sequence[Any]) -> None:
        if batch.work or batch.expired:
            self._loop.call_soon_threadsafe(_deliver, batch, results)

    def _end_calls(self) -> None:
        while not self._wake.empty():
            if (run := self._wake.get()) is not None:
                run()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.put(None)
        with self._lock:
            waiting = self.batcher.pop(float("inf"))
        _fail(waiting)
        for thread in self._threads:
            await self._loop.run_in_executor(None, thread.join, 10.0)


class InlineWorker:
    """A worker for virtual time: batches run on the loop, one after the other, at the runtime's modelled cost."""

    def __init__(self, batcher: Batcher, compute: Compute, runtime: Runtime) -> None:
        self.batcher = batcher
        self._compute = compute
        self._runtime = runtime
        self._device = asyncio.Lock()
        self._closed = False
        self._pump: asyncio.Task[None] | None = None

    def submit(self, work: Work) -> None:
        if self._closed:
            raise ClosedError("The host is closed.")
        self.batcher.push(work, self._runtime.clock.time())
        if self._pump is None or self._pump.done():
            self._pump = self._runtime.spawn(self._drain(), "device")

    async def call(self, fn: Callable[[], T]) -> T:
        if self._closed:
            raise ClosedError("The host is closed.")
        async with self._device:
            return await self._runtime.offload(fn)

    async def _drain(self) -> None:
        while len(self.batcher) and not self._closed:
            async with self._device:
                now_s = self._runtime.clock.time()
                batch = self.batcher.pop(now_s)
                results: Sequence[Any] = ()
                if batch.work:
                    results = await self._runtime.offload(_computed, self._compute, batch.work)
                    ended_s = self._runtime.clock.time()
                    elapsed_s = ended_s - now_s
                    self.batcher.done(batch.work, elapsed_s, ended_s)
                    for work in batch.work:
                        work.compute_s = elapsed_s
                _deliver(batch, results)

    async def close(self) -> None:
        self._closed = True
        _fail(self.batcher.pop(float("inf")))


def _deliver(batch: Batch, results: Sequence[Any]) -> None:
    for work, result in zip(batch.work, results, strict=True):
        _resolve(work, result)
    _expire(batch)


def _fail(waiting: Batch) -> None:
    """Everything that waits ends: at the end of time all of it has expired."""
    for work in waiting.expired:
        _resolve(work, HostBusyError("The host is closing.", fix="Ask another replica."))


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
