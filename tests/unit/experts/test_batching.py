"""The batcher, and the workers that run it."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from swarm.clock import SystemClock
from swarm.errors import ClosedError, ExpertFailedError, HostBusyError
from swarm.experts.batching import Batcher, Work
from swarm.experts.workers import DeviceWorker, InlineWorker
from swarm.runtime import Runtime
from swarm.simulation.virtual import VirtualRuntime, run_virtual


def loopless(key: str, tokens: int = 1, expires_s: float = 100.0, caller: str = "") -> Work:
    return Work(key, tokens, expires_s, job=key, future=asyncio.Future(loop=_LOOP), caller=caller)


class _NoLoop(asyncio.AbstractEventLoop):
    """Futures need one to exist; nothing is ever scheduled on it."""

    def get_debug(self) -> bool:
        return False

    def call_soon(self, *args: Any, **kwargs: Any) -> Any:
        return None


_LOOP = _NoLoop()


def test_work_of_one_key_is_taken_together_up_to_the_budget() -> None:
    batcher = Batcher(max_batch_tokens=4, max_queued_tokens=100)
    work = [loopless("a", 2), loopless("b", 1), loopless("a", 2), loopless("a", 1), loopless("b", 1)]
    for w in work:
        batcher.push(w, 1.0)
    assert (len(batcher), batcher.queued_tokens) == (5, 7)
    assert batcher.pop(3.0).work == [work[0], work[2]]
    assert batcher.pop(3.0).work == [work[1], work[4]], "the rest of a key is younger"
    assert batcher.pop(3.0).work == [work[3]]
    assert batcher.pop(3.0).work == []
    assert batcher.queued_tokens == 0
    assert work[0].queue_s == 2.0


def test_a_full_queue_refuses_but_an_empty_one_takes_any_size() -> None:
    batcher = Batcher(max_batch_tokens=4, max_queued_tokens=10)
    batcher.push(loopless("a", 50), 0.0)
    with pytest.raises(HostBusyError):
        batcher.push(loopless("a", 1), 0.0)
    assert [w.tokens for w in batcher.pop(0.0).work] == [50]
    batcher.push(loopless("a", 10), 0.0)
    assert batcher.stats.refused == 1


def test_a_flood_on_one_expert_does_not_starve_another_and_the_oldest_work_is_always_next() -> None:
    batcher = Batcher(max_batch_tokens=2, max_queued_tokens=1000)
    for _ in range(5):
        batcher.push(loopless("flood"), 0.0)
    quiet = loopless("quiet")
    batcher.push(quiet, 0.0)
    batches = []
    for _ in range(4):
        batches.append(batcher.pop(0.0).work)
        for _ in range(3):
            batcher.push(loopless("flood"), 0.0)
    # three batches hold the five that are older and one of the flood that follows
    assert batches[3] == [quiet]


@pytest.mark.parametrize("seed", range(5))
def test_no_work_waits_for_younger_work_of_another_key(seed: int) -> None:
    rng = random.Random(seed)
    batcher = Batcher(max_batch_tokens=6, max_queued_tokens=10**6)
    age: dict[int, int] = {}
    waiting: list[Work] = []
    for _ in range(400):
        if rng.random() < 0.6:
            work = loopless(rng.choice("abcd"), rng.randint(1, 4))
            age[id(work)] = len(age)
            waiting.append(work)
            batcher.push(work, 0.0)
        elif waiting:
            batch = batcher.pop(0.0).work
            assert batch[0] is min(waiting, key=lambda w: age[id(w)])
            assert len({w.key for w in batch}) == 1
            waiting = [w for w in waiting if w not in batch]
    assert batcher.queued_tokens == sum(w.tokens for w in waiting)
    while batcher.pop(0.0).work:
        pass
    assert (len(batcher), batcher.queued_tokens) == (0, 0)


def test_one_caller_cannot_fill_the_queue() -> None:
    batcher = Batcher(max_batch_tokens=4, max_queued_tokens=100)

    def fill(caller: str) -> int:
        for count in range(1000):
            try:
                batcher.push(loopless("k", 2, caller=caller), 0.0)
            except HostBusyError:
                return 2 * count
        raise AssertionError("never refused")

    assert [fill(c) for c in ("hog", "second", "third")] == [50, 26, 12]
    batcher.push(loopless("k", 10, caller="newcomer"), 0.0)
    while batcher.pop(0.0).work:
        pass
    assert fill("third") == 50, "what has left the queue no longer counts"


def test_cancelled_and_expired_work_is_dropped_when_its_turn_comes() -> None:
    batcher = Batcher(max_batch_tokens=2, max_queued_tokens=100)
    gone, late, good = loopless("a", 2), loopless("a", 2, expires_s=5.0), loopless("a", 2)
    for w in (gone, late, good):
        batcher.push(w, 0.0)
    gone.future.cancel()
    batch = batcher.pop(5.0)
    assert (batch.work, batch.expired) == ([good], [late])
    assert (batcher.stats.cancelled, batcher.stats.expired, batcher.queued_tokens) == (1, 1, 0)


def test_the_expected_wait_follows_the_measured_speed() -> None:
    batcher = Batcher(max_batch_tokens=100, max_queued_tokens=100)
    assert batcher.expected_wait_s == 0.0
    batcher.done([loopless("a", 50)], 0.5)
    batcher.push(loopless("a", 30), 0.0)
    assert batcher.expected_wait_s == pytest.approx(0.3)
    for _ in range(100):
        batcher.done([loopless("a", 50)], 0.25)
    assert batcher.expected_wait_s == pytest.approx(0.15, rel=1e-3)


def echo(batch: Sequence[Work]) -> list[Any]:
    return [w.job for w in batch]


async def submit(worker: DeviceWorker | InlineWorker, job: Any, key: str = "k") -> Any:
    work = Work(key, 1, float("inf"), job, asyncio.get_running_loop().create_future())
    worker.submit(work)
    return await work.future


async def hold(worker: DeviceWorker) -> tuple[asyncio.Task[bool], threading.Event]:
    """Keep the device busy until the event is set; returns when it is."""
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def wait() -> bool:
        loop.call_soon_threadsafe(begun.set)
        return gate.wait(10.0)

    held = asyncio.create_task(worker.call(wait))
    await begun.wait()
    return held, gate


def test_the_thread_computes_batches_while_the_loop_goes_on() -> None:
    async def body() -> None:
        sizes: list[int] = []
        names = set()

        def compute(batch: Sequence[Work]) -> list[Any]:
            names.add(threading.current_thread().name)
            sizes.append(len(batch))
            return echo(batch)

        worker = DeviceWorker(Batcher(8, 100), compute, SystemClock(), "device-x")
        held, gate = await hold(worker)
        calls = [asyncio.create_task(submit(worker, i)) for i in range(5)]
        await asyncio.sleep(0)
        assert worker.batcher.queued_tokens == 5
        gate.set()
        assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]
        assert await held
        assert (sizes, names) == ([5], {"device-x"})
        assert worker.batcher.stats.batched == 5
        await worker.close()
        await worker.close()

    asyncio.run(body())


def test_errors_of_functions_arrive_and_bugs_fail_their_requests_only() -> None:
    async def body() -> None:
        def compute(batch: Sequence[Work]) -> list[Any]:
            if batch[0].job == "bug":
                raise KeyError("bug")
            return echo(batch)

        worker = DeviceWorker(Batcher(8, 100), compute, SystemClock())
        with pytest.raises(ZeroDivisionError):
            await worker.call(lambda: 1 // 0)
        assert isinstance(await submit(worker, "bug"), ExpertFailedError)
        assert await submit(worker, "fine") == "fine"
        await worker.close()

    asyncio.run(body())


def test_closing_ends_whatever_waits() -> None:
    async def body() -> None:
        worker = DeviceWorker(Batcher(8, 100), echo, SystemClock())
        held, gate = await hold(worker)
        waiting = [asyncio.create_task(submit(worker, 1)), asyncio.create_task(worker.call(lambda: 2))]
        await asyncio.sleep(0)
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert await held
        assert isinstance(await waiting[0], HostBusyError)
        with pytest.raises(ClosedError):
            await waiting[1]
        with pytest.raises(ClosedError):
            await submit(worker, 1)
        with pytest.raises(ClosedError):
            await worker.call(lambda: 1)

    asyncio.run(body())


def test_in_virtual_time_batches_run_on_the_loop_at_a_modelled_cost() -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        runtime: Runtime = VirtualRuntime(loop, 0, "p", offload_cost_s=1.0)  # type: ignore[arg-type]
        worker = InlineWorker(Batcher(8, 100), echo, runtime)
        first = asyncio.create_task(submit(worker, 1))
        await asyncio.sleep(0.5)
        rest = [asyncio.create_task(submit(worker, i)) for i in (2, 3)]
        assert await first == 1
        assert loop.time() == pytest.approx(1.0)
        assert await asyncio.gather(*rest) == [2, 3]
        assert loop.time() == pytest.approx(2.0)
        assert await worker.call(lambda: 7) == 7
        waiting = asyncio.create_task(submit(worker, 4))
        later = asyncio.create_task(submit(worker, 5, key="other"))
        await asyncio.sleep(0.1)
        await worker.close()
        assert await waiting == 4
        assert isinstance(await later, HostBusyError)
        with pytest.raises(ClosedError):
            await submit(worker, 1)

    run_virtual(body)


class StepClock:
    """Moves on by `step_s` whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def time(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def wall(self) -> float:
        return self.now_s


def test_one_interrupted_batch_does_not_send_the_next_hundred_to_the_thread() -> None:
    async def body() -> None:
        where: list[threading.Thread] = []

        def compute(batch: Sequence[Work]) -> list[Any]:
            where.append(threading.current_thread())
            return echo(batch)

        clock = StepClock(0.0)
        worker = DeviceWorker(Batcher(8, 100), compute, clock)
        for i in range(20):
            await submit(worker, i)
        here = threading.current_thread()
        assert where[-1] is here
        clock.step_s = 0.005
        await submit(worker, 1)
        clock.step_s = 0.0
        await submit(worker, 2)
        assert where[-1] is not here, "it may have become slow"
        for i in range(8):
            await submit(worker, i)
        assert where[-1] is here
        await worker.close()

    asyncio.run(body())


@pytest.mark.parametrize(("step_s", "inline"), [(0.0, True), (1.0, False)])
def test_only_work_known_to_be_tiny_is_computed_on_the_loop(step_s: float, inline: bool) -> None:
    async def body() -> None:
        where: list[threading.Thread] = []

        def compute(batch: Sequence[Work]) -> list[Any]:
            where.append(threading.current_thread())
            return echo(batch)

        worker = DeviceWorker(Batcher(8, 100), compute, StepClock(step_s))
        for i in range(20):
            assert await submit(worker, i) == i
        here = threading.current_thread()
        assert here not in where[:8], "what is not known yet is computed by the thread"
        assert (where[-1] is here) == inline
        await submit(worker, 0, key="another expert")
        assert where[-1] is not here
        held, gate = await hold(worker)
        waiting = asyncio.create_task(submit(worker, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "the device is busy: the loop does not wait for it"
        gate.set()
        assert await waiting == 1
        assert await held
        assert worker.batcher.stats.batched == 22
        await worker.close()

    asyncio.run(body())


def test_the_next_batch_is_prepared_while_one_is_computed() -> None:
    async def body() -> None:
        computing, gate = asyncio.Event(), threading.Event()
        second_prepared = threading.Event()
        loop = asyncio.get_running_loop()
        prepared: list[list[Any]] = []
        order: list[Any] = []

        def prepare(batch: Sequence[Work]) -> None:
            prepared.append([w.job for w in batch])
            if len(prepared) == 2:
                second_prepared.set()
            if batch[0].job == "broken":
                raise RuntimeError("out of memory")

        def compute(batch: Sequence[Work]) -> list[Any]:
            if batch[0].job == "first":
                loop.call_soon_threadsafe(computing.set)
                gate.wait(10.0)
            order.extend(w.job for w in batch)
            return echo(batch)

        worker = DeviceWorker(Batcher(8, 100), compute, SystemClock(), prepare=prepare)
        first = asyncio.create_task(submit(worker, "first"))
        await computing.wait()
        second = asyncio.create_task(submit(worker, "second", key="b"))
        third = asyncio.create_task(submit(worker, "third", key="c"))
        assert await asyncio.to_thread(second_prepared.wait, 10.0)
        assert prepared == [["first"], ["second"]], "one batch ahead, no more: what comes meanwhile joins the third"
        joining = asyncio.create_task(submit(worker, "joining", key="c"))
        called = asyncio.create_task(worker.call(lambda: order.append("call")))
        await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(first, second, third, joining) == ["first", "second", "third", "joining"]
        await called
        assert prepared[2] == ["third", "joining"]
        assert [o for o in order if o != "call"] == ["first", "second", "third", "joining"]
        assert await submit(worker, "broken") == "broken", "computing copies what could not be prepared"
        await worker.close()
        with pytest.raises(ClosedError):
            await submit(worker, 1)

    asyncio.run(body())


def test_closing_ends_a_worker_that_prepares() -> None:
    async def body() -> None:
        worker = DeviceWorker(Batcher(8, 100), echo, SystemClock(), prepare=lambda batch: None)
        held, gate = await hold(worker)
        waiting = [asyncio.create_task(submit(worker, n, key=str(n))) for n in range(3)]
        await asyncio.sleep(0)
        closing = asyncio.create_task(worker.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert await held
        for result in await asyncio.gather(*waiting):
            assert isinstance(result, HostBusyError) or result in range(3)
        assert not any(t.is_alive() for t in worker._threads)

    asyncio.run(body())
