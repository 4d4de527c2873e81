"""The loop thread, its synchronous facade, and the process-wide settings around it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from swarm.errors import LoopThreadError
from swarm.net.loop import LoopThread, loop_thread, switch_interval

ROOT = Path(__file__).parents[3]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=full, capture_output=True, text=True, timeout=50, check=False
    )


def test_one_thread_per_process() -> None:
    assert loop_thread() is loop_thread()
    assert loop_thread().run(current_thread_name()) == "swarm-loop"


async def current_thread_name() -> str:
    return threading.current_thread().name


def test_blocking_call_on_the_loop_thread_is_refused() -> None:
    thread = loop_thread()

    async def blocks() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(LoopThreadError, match="wait for itself"):
        thread.run(blocks(), timeout_s=5)


def test_timeout_cancels_the_coroutine() -> None:
    cancelled = threading.Event()

    async def stuck() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match="not done within"):
        loop_thread().run(stuck(), timeout_s=0.05)
    assert cancelled.wait(5)


def test_timeout_of_the_coroutine_itself_comes_through() -> None:
    async def times_out() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError) as caught:
        loop_thread().run(times_out(), timeout_s=30)
    assert "not done within" not in str(caught.value)


def test_interrupt_cancels_the_coroutine() -> None:
    cancelled = threading.Event()

    async def stuck() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        loop_thread().run(stuck())
    assert cancelled.wait(5)


def test_result_error_and_cancellation_come_through() -> None:
    async def fails() -> None:
        raise KeyError("reason")

    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    assert loop_thread().run(asyncio.sleep(0, "result"), timeout_s=5) == "result"
    with pytest.raises(KeyError, match="reason"):
        loop_thread().run(fails())
    with pytest.raises(CancelledError):
        loop_thread().run(cancels_itself())


def test_error_after_the_timeout_is_nobodys() -> None:
    unhandled: list[str] = []
    done = threading.Event()

    async def fails_late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            asyncio.get_running_loop().call_later(0.05, done.set)
            raise KeyError("late")

    thread = loop_thread()
    thread.loop.set_exception_handler(lambda _, context: unhandled.append(context["message"]))
    try:
        with pytest.raises(TimeoutError):
            thread.run(fails_late(), timeout_s=0.05)
        assert done.wait(5)
        gc.collect()
        assert not unhandled
    finally:
        thread.loop.set_exception_handler(None)


def test_switch_interval_is_set_while_any_peer_runs_and_restored_after() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        with switch_interval():
            assert sys.getswitchinterval() == pytest.approx(5e-4)
            with switch_interval():
                pass
            assert sys.getswitchinterval() == pytest.approx(5e-4)
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before)


def test_grpc_imported_early_is_warned_about() -> None:
    code = "import grpc\nfrom swarm.net.loop import loop_thread\nloop_thread()"
    env = {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    assert "GrpcImportedEarly" in python(code, **env).stderr
    late = "from swarm.net.loop import loop_thread\nloop_thread()\nimport grpc, os\n" + (
        "assert os.environ['GRPC_ENABLE_FORK_SUPPORT'] == '0'"
    )
    done = python(late, **env)
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_by_itself_while_the_loop_is_busy() -> None:
    code = """
import asyncio
from swarm.net.loop import loop_thread
loop_thread().submit(asyncio.sleep(1000))
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_process_ends_by_itself_while_a_peer_serves() -> None:
    code = """
from tests.support import GrpcWorld
from swarm.net.transport import UnaryMethod
ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)
async def echo(context, request): return request
async def main():
    a, b = await world.transport(), await world.transport()
    b.serve(ECHO, echo)
    assert await a.call(b.contact, ECHO, b"x") == b"x"
world = GrpcWorld()
world.run(main)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_fresh_loop_threads_are_independent() -> None:
    other = LoopThread()
    try:
        assert other.run(asyncio.sleep(0, "done")) == "done"
        with pytest.raises(LoopThreadError):
            other.run(nested(other), timeout_s=5)
    finally:
        other._stop()
        other.loop.close()


async def nested(thread: LoopThread) -> None:
    assert thread.current
    thread.run(asyncio.sleep(0))


FORKING = """
import asyncio, sys, warnings
import torch
from torch.utils.data import DataLoader, Dataset
from tests.support import GrpcWorld
from swarm.net.loop import loop_thread, switch_interval
from swarm.net.transport import UnaryMethod

torch.set_num_threads(1)
ECHO = UnaryMethod("/swarm.pb.Test/Echo", bytes, bytes)

class Numbers(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((64,), float(i))

async def echo(context, request): return request

async def traffic(a, b):
    n = 0
    while True:
        assert await a.call(b.contact, ECHO, bytes(1000)) == bytes(1000)
        n += 1
        counter[0] = n

async def make(world):
    a, b = await world.transport(), await world.transport()
    b.serve(ECHO, echo)
    return a, b

if __name__ == "__main__":
    counter = [0]
    world = GrpcWorld()
    with switch_interval():
        a, b = world.run(lambda: make(world))
        running = loop_thread().submit(traffic(a, b))
        for epoch in range(3):
            before = counter[0]
            total = sum(float(batch.sum()) for batch in DataLoader(Numbers(), batch_size=8, num_workers=2,
                        multiprocessing_context="fork"))
            assert total == 64 * sum(range(64)), total
            assert counter[0] > before, "the traffic stopped"
        assert not running.done(), running.exception()
        running.cancel()
        world.close()
    print("survived", flush=True)
"""


def test_dataloader_workers_that_fork_under_traffic_survive(tmp_path: Path) -> None:
    script = tmp_path / "forking.py"
    script.write_text(FORKING)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "1"},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "survived\n"
