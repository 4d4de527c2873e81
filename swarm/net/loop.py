"""The process's one event-loop thread, and the synchronous way into it.

`grpc.aio` allows one event loop per process, so all peers of a process share this daemon thread, while the user's
thread trains. Two process-wide settings belong to it: gRPC's fork handlers are switched off (DataLoader workers fork,
and with the handlers on they crash), and the interpreter switches threads more often while a peer runs.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

from swarm.errors import LoopThreadError

T = TypeVar("T")

PEER_SWITCH_INTERVAL_S = 5e-4
_POLL_S = 1.0
_STOP_S = 2.0
_FORK_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"


class GrpcImportedEarly(RuntimeWarning):
    """grpc was imported with its fork handlers on before swarm could switch them off."""


def disable_grpc_fork_handlers() -> None:
    """Switch gRPC's fork handlers off. Must run before grpc is imported; else warns `GrpcImportedEarly`."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # failures reach users as typed errors, not as lines on stderr
    if os.environ.get(_FORK_VARIABLE) == "0":
        return
    os.environ[_FORK_VARIABLE] = "0"
    if "grpc._cython.cygrpc" in sys.modules:
        warnings.warn(
            "grpc was imported before swarm with its fork handlers on: DataLoader workers that fork may crash. "
            f"Import swarm first, or set {_FORK_VARIABLE}=0 in the environment.",
            GrpcImportedEarly,
            stacklevel=3,
        )


class _Job(Generic[T]):
    """A coroutine that another thread waits for.

    A bare lock wakes that thread with half the work of `run_coroutine_threadsafe`, which chains two futures with
    a condition each.
    """

    __slots__ = ("_coroutine", "_loop", "_task", "finished")

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.finished = threading.Lock()
        self.finished.acquire()

    def start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._done)

    def _done(self, _: asyncio.Task[T]) -> None:
        self.finished.release()

    def cancel(self) -> None:
        """Nobody waits any more. Runs on the loop, after `start` if that was asked for."""
        if self._task is None:
            self._coroutine.close()
            self.finished.release()
            return
        self._task.cancel()
        self._task.add_done_callback(_look_at)

    def result(self) -> T:
        """What the finished coroutine returned or raised. Raises `concurrent.futures.CancelledError` if cancelled."""
        assert self._task is not None
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise CancelledError from None


def _look_at(task: asyncio.Task[Any]) -> None:
    """An error that nobody waits for is no reason for asyncio to complain."""
    if not task.cancelled():
        task.exception()


class LoopThread:
    """A daemon thread that runs an asyncio loop for the life of the process. Use `loop_thread()` to get the one.

    Attributes:
        loop: The loop. Everything that touches `grpc.aio` runs on it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.loop.call_soon(started.set)
        self._thread = threading.Thread(target=self._main, name="swarm-loop", daemon=True)
        self._thread.start()
        started.wait()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def current(self) -> bool:
        """Whether the calling code runs on the loop thread."""
        return threading.current_thread() is self._thread

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            LoopThreadError: Called on the loop thread itself.
            TimeoutError: Not done within `timeout_s`; the coroutine is cancelled. So it is on Ctrl-C, which is raised
                once the coroutine has ended, or after 2 s: it may have worked in the caller's memory.
        """
        if self.current:
            coroutine.close()
            raise LoopThreadError(
                "A blocking call was made on swarm's event-loop thread, where it would wait for itself.",
                fix="Call the async form there, or make the blocking call on another thread.",
            )
        job = _Job(self.loop, coroutine)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        done = False
        try:
            # Within the guard: the coroutine may have begun, and Ctrl-C come, before this returns.
            self.loop.call_soon_threadsafe(job.start)
            while not done:
                # Waiting in pieces keeps Ctrl-C working where a lock cannot be interrupted.
                left = _POLL_S if end is None else min(_POLL_S, max(0.0, end - time.monotonic()))
                done = job.finished.acquire(timeout=left)
                if not done and end is not None and time.monotonic() >= end:
                    break
        except BaseException:
            self.loop.call_soon_threadsafe(job.cancel)
            job.finished.acquire(timeout=_STOP_S)
            raise
        if not done:
            self.loop.call_soon_threadsafe(job.cancel)
            raise TimeoutError(f"The call was not done within {timeout_s} s.")
        return job.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop, from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, fn: Callable[..., object], *args: Any) -> None:
        """Call `fn(*args)` on the loop, from any thread."""
        self.loop.call_soon_threadsafe(fn, *args)

    def _stop(self) -> None:
        if self._thread.is_alive():
            future = self.submit(self._cancel_all())
            with suppress(TimeoutError):  # a task that resists cancellation must not keep the process alive
                future.result(_STOP_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(_STOP_S)

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Process:
    """What exists once per process. Bound to the process id, so that a forked child starts afresh."""

    lock = threading.Lock()
    pid = 0
    thread: LoopThread | None = None
    peers = 0
    saved_interval_s = 0.0


def loop_thread() -> LoopThread:
    """The process's loop thread, started on first use."""
    with _Process.lock:
        if _Process.thread is None or _Process.pid != os.getpid():
            disable_grpc_fork_handlers()
            _Process.thread, _Process.pid = LoopThread(), os.getpid()
            atexit.register(_Process.thread._stop)
        return _Process.thread


@contextmanager
def switch_interval() -> Iterator[None]:
    """Let threads switch every 0.5 ms while any peer runs: a busy training thread then delays a small call by less.

    Reference-counted; the last to leave restores what the interpreter had before.
    """
    with _Process.lock:
        if _Process.peers == 0:
            _Process.saved_interval_s = sys.getswitchinterval()
            sys.setswitchinterval(min(PEER_SWITCH_INTERVAL_S, _Process.saved_interval_s))
        _Process.peers += 1
    try:
        yield
    finally:
        with _Process.lock:
            _Process.peers -= 1
            if _Process.peers == 0:
                sys.setswitchinterval(_Process.saved_interval_s)
