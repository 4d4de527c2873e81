"""The parent's handle on one process of a local swarm: start, watch, freeze, kill, and read what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from swarm.errors import ProcessError
from swarm.simulation.status import (
    EVENTS_FILE,
    LOG_FILE,
    STATUS_FILE,
    STOP_COMMAND,
    STOP_GRACE_S,
    ProcessConfig,
    read_json_lines,
)

POLL_S = 0.02
LOG_TAIL_LINES = 15
FREEZE_TIMEOUT_S = 2.0


def spawn(
    arguments: list[str], *, log: Path | None = None, threads: int = 1, answers: bool = False
) -> subprocess.Popen[bytes]:
    """Start a Python process whose standard input is a pipe that only we hold, outside our terminal's Ctrl-C group.

    Its output goes to `log`, or nowhere; with `answers` standard output is a pipe.
    """
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
    output = log.open("ab") if log is not None else None
    try:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else output or subprocess.DEVNULL,
            stderr=output or subprocess.DEVNULL,
            env=environment,
            creationflags=flags,
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()


class ChildProcess:
    """One process of a local swarm, over all its restarts.

    Attributes:
        config: What the process was started with.
        peer_id: The identity it reported; kept over restarts.
        killed: True from `kill` until `restart`.
        frozen: True between `freeze` and `thaw`.
    """

    def __init__(self, config: ProcessConfig) -> None:
        self.config = config
        self.peer_id: str | None = None
        self.killed = False
        self.frozen = False
        self.stage = "not started"
        self.details: dict[str, Any] = {}
        self._joined = False
        self._popen: subprocess.Popen[bytes] | None = None
        self._offset = 0
        self._lock = threading.RLock()

    @property
    def name(self) -> str:
        return self.config.name

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it. A second start continues with the same identity and data."""
        with self._lock:
            if self.running:
                raise ProcessError(f"{self.name} is running already.")
            self._release()
            self.config.path.mkdir(parents=True, exist_ok=True)
            file = self.config.write()
            self.refresh()  # skips what an earlier life wrote
            self.stage, self.details = "starting", {}
            self.killed = self.frozen = self._joined = False
            self._popen = spawn(
                ["swarm.simulation.process", str(file)],
                log=self.config.path / LOG_FILE,
                threads=self.config.torch_threads,
            )

    @property
    def running(self) -> bool:
        """True while the process exists, frozen or not."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        if self._popen is None:
            raise ProcessError(f"{self.name} was never started.")
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._popen is None else self._popen.poll()

    @property
    def state(self) -> str:
        """`starting`, `ready`, `frozen`, `killed`, `left`, `done` or `failed`."""
        self.refresh()
        if self.killed:
            return "killed"
        if self.running:
            if self.frozen:
                return "frozen"
            return "ready" if self._joined else "starting"
        return self.stage if self.stage in ("left", "done") else "failed"

    def refresh(self) -> None:
        """Read what the process has written to its status file since the last time."""
        with self._lock:
            records, self._offset = read_json_lines(self.config.path / STATUS_FILE, self._offset)
            for record in records:
                self.stage = str(record.pop("stage", self.stage))
                self.details = {**self.details, **record}
                self._joined = self._joined or self.stage == "ready"
                self.peer_id = self.details.get("peer_id", self.peer_id)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the process has joined the run. Raises `ProcessError` with the stage and the end of its log."""
        deadline = time.monotonic() + timeout_s
        while True:
            alive = self.running
            self.refresh()
            if self._joined:  # whatever became of it since
                return
            if self.stage == "failed" or not alive:
                during = self.details.get("during", self.stage)
                cause = self.details.get("error", f"it ended with exit code {self.exit_code}")
                raise self._failure(f"failed while {during}: {cause.rstrip('.')}")
            if time.monotonic() >= deadline:
                raise self._failure(f"was not ready after {timeout_s:g} s; it was still {self.stage}")
            time.sleep(POLL_S)

    def _failure(self, what: str) -> ProcessError:
        tail = "\n".join(f"  | {line}" for line in self.logs().splitlines()[-LOG_TAIL_LINES:])
        return ProcessError(f"{self.name} {what}.\n{tail or '  | (its log is empty)'}", fix="The log above tells more.")

    def kill(self) -> None:
        """End the process at once, as a power cut would (SIGKILL)."""
        with self._lock:
            process = self._process()
            self.killed = True
            try:
                process.kill()
            except psutil.NoSuchProcess:
                return
            finally:
                self._reap(timeout_s=10.0)

    def freeze(self) -> None:
        """Suspend the process: it keeps its connections but does nothing."""
        with self._lock:
            process = self._process()
            process.suspend()
            self.frozen = True
            deadline = time.monotonic() + FREEZE_TIMEOUT_S
            while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
                time.sleep(POLL_S)  # the signal takes effect a little later

    def thaw(self) -> None:
        """Let a frozen process go on; does nothing if it has ended or is not frozen."""
        with self._lock:
            if self.frozen and self.running:
                self._process().resume()
            self.frozen = False

    def request_stop(self) -> None:
        """Ask the process to leave; a frozen one is thawed first."""
        with self._lock:
            if not self.running or self._popen is None or self._popen.stdin is None:
                return
            self.thaw()
            try:
                self._popen.stdin.write(f"{STOP_COMMAND}\n".encode())
                self._popen.stdin.flush()
                self._popen.stdin.close()
            except (OSError, ValueError):  # it ended just now, or was asked before
                return

    def wait(self, timeout_s: float) -> int:
        """Wait for the process to end and return its exit code. Raises `ProcessError`."""
        assert self._popen is not None
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise self._failure(f"had not ended after {timeout_s:g} s") from error
        self.refresh()
        return code

    def stop(self) -> None:
        """Ask the process to leave, and end it if it does not."""
        self.request_stop()
        self._reap(timeout_s=STOP_GRACE_S + 2.0)

    def _reap(self, timeout_s: float) -> None:
        if self._popen is None:
            return
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(10.0)
        self._release()

    def _release(self) -> None:
        if self._popen is not None and self._popen.stdin is not None and not self._popen.stdin.closed:
            try:
                self._popen.stdin.close()
            except OSError:  # the other end is gone
                return

    def _process(self) -> psutil.Process:
        if not self.running:
            raise ProcessError(f"{self.name} is not running.", fix="Start it again with restart().")
        return psutil.Process(self.pid)

    def logs(self) -> str:
        """Everything the process printed, over all its lives."""
        file = self.config.path / LOG_FILE
        return file.read_text("utf-8", errors="replace") if file.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """The peer's events as dicts with `kind` and `time_s`, oldest first, over all its lives."""
        return read_json_lines(self.config.path / EVENTS_FILE)[0]

    def events_since(self, offset: int) -> tuple[list[dict[str, Any]], int]:
        """The events from byte `offset` of the event file on, and the offset to continue from."""
        return read_json_lines(self.config.path / EVENTS_FILE, offset)
