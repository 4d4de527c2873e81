"""Ctrl-C for commands that run until stopped: the first asks to leave cleanly, the second aborts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ABORTED_EXIT_CODE = 130


class Stopping:
    """Counts requests to stop. `wait` returns early when the first one comes; the second ends the process at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask to stop, as Ctrl-C does."""
        if self._asked.is_set():
            sys.stderr.write("swarm: aborted\n")
            sys.stderr.flush()
            os._exit(ABORTED_EXIT_CODE)
        self._asked.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s`; says whether a stop was asked for."""
        return self._asked.wait(timeout_s)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Handle Ctrl-C and its kin while the block runs; the old handlers return afterwards.

    These are SIGINT, SIGTERM, on Windows Ctrl-Break, and elsewhere a closed terminal unless that is ignored (nohup).
    Call it on the main thread.
    """
    state = Stopping()

    def handle(signum: int, frame: FrameType | None) -> None:
        state.ask()

    with _handling(handle, ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP")):
        yield state


@contextmanager
def interrupted_by_termination() -> Iterator[None]:
    """Let SIGTERM and its kin interrupt the block as Ctrl-C does, for commands that end by themselves.

    Raises:
        KeyboardInterrupt: In the block, at such a signal. Call it on the main thread.
    """

    def handle(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(handle, ("SIGTERM", "SIGBREAK", "SIGHUP")):
        yield


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None], names: Sequence[str]) -> Iterator[None]:
    """Handle these signals, where they exist, while the block runs; a hang-up that is ignored stays so (nohup)."""
    present = [name for name in names if hasattr(signal, name)]
    if "SIGHUP" in present and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        present.remove("SIGHUP")
    previous = {name: signal.signal(getattr(signal, name), handle) for name in present}
    try:
        yield
    finally:
        for name, handler in previous.items():
            signal.signal(getattr(signal, name), handler)


def run_to_end(closing: Callable[[], None]) -> None:
    """Run a blocking clean-up on a thread of its own, so that the main thread can still take a second Ctrl-C.

    Windows delivers signals only between waits of the main thread, hence the short ones.
    Re-raises what `closing` raised.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            closing()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread below
            failures.append(error)

    thread = threading.Thread(target=run, name="swarm-leaving", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failures:
        raise failures[0]
