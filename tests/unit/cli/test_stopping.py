"""Ctrl-C: the first asks, the second aborts, and the old handlers come back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from swarm.cli.stopping import ABORTED_EXIT_CODE, interrupted_by_termination, run_to_end, stopping


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_first_signal_asks_to_stop(name: str) -> None:
    before = signal.getsignal(getattr(signal, name))
    with stopping() as stop:
        assert not stop.wait(0.0)
        signal.raise_signal(getattr(signal, name))
        assert stop.wait(5.0)
        assert stop.asked
    assert signal.getsignal(getattr(signal, name)) is before


@pytest.mark.parametrize(("before", "asked"), [("SIG_IGN", False), ("SIG_DFL", True)])
def test_a_closed_terminal_asks_to_stop_unless_that_is_ignored(before: str, asked: bool) -> None:
    if not hasattr(signal, "SIGHUP"):  # Windows has none
        assert sys.platform == "win32"
        return
    previous = signal.signal(signal.SIGHUP, getattr(signal, before))
    try:
        with stopping() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.asked is asked
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_second_signal_aborts_at_once() -> None:
    script = """
import signal, threading
from swarm.cli.stopping import run_to_end, stopping
with stopping() as stop:
    signal.raise_signal(signal.SIGINT)
    print("asked", stop.asked, flush=True)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    run_to_end(threading.Event().wait)
print("never")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == ABORTED_EXIT_CODE
    assert done.stdout == "asked True\n"
    assert "aborted" in done.stderr


def test_closing_runs_elsewhere_and_its_failure_comes_back() -> None:
    threads: list[str] = []
    run_to_end(lambda: threads.append(threading.current_thread().name))
    assert threads == ["swarm-leaving"]

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_to_end(fail)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_termination_interrupts_like_ctrl_c(name: str) -> None:
    if not hasattr(signal, name):  # Windows has no SIGHUP
        assert sys.platform == "win32"
        return
    before = signal.getsignal(getattr(signal, name))
    steps: list[str] = []

    def work() -> None:
        with interrupted_by_termination():
            try:
                signal.raise_signal(getattr(signal, name))
                steps.append("never")
            finally:
                steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["cleaned up"]
    assert signal.getsignal(getattr(signal, name)) is before
