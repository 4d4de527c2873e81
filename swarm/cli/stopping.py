"""Ctrl-C for commands that run until stopped: the first asks to leave cleanly, the second aborts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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

    names = [name for name in ("SIGINT", "SIGTERM", "SIGBREAK", "SIGHUP") if hasattr(signal, name)]
    if "SIGHUP" in names and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        names.remove("SIGHUP")
    previous = {name: signal.signal(getattr(signal, name), handle) for name in names}
    try:
        yield state
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
