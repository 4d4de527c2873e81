"""A process that outlives a crashed parent just long enough to remove what the parent started.

`python -m swarm.simulation.warden DIRECTORY` waits for the end of its standard input, a pipe that only the parent
holds. A parent that cleaned up by itself writes `done` first. Frozen processes cannot notice that the parent is gone;
the warden kills them.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import psutil

from swarm.simulation.status import PID_FILE, STOP_GRACE_S


def processes_in(directory: Path) -> list[psutil.Process]:
    """The living processes whose pid files lie below `directory`; creation times rule out reused pids."""
    found = []
    for file in sorted(directory.glob(f"*/{PID_FILE}")):
        try:
            record = json.loads(file.read_text("utf-8"))
            process = psutil.Process(int(record["pid"]))
            if abs(process.create_time() - float(record["created"])) < 1.0:
                found.append(process)
        except (OSError, ValueError, KeyError, psutil.NoSuchProcess):
            continue
    return found


def clear(directory: Path, grace_s: float) -> None:
    """Wait up to `grace_s` for the processes to leave, kill those that remain, remove the directory."""
    processes = processes_in(directory)
    for process in processes:
        try:
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=5.0)
    shutil.rmtree(directory, ignore_errors=True)


def main(argv: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = sys.stdin.read()
    if "done" not in said.split():
        clear(Path(argv[0]), grace_s=STOP_GRACE_S + 2.0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
