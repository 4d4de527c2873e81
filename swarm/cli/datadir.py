"""Where commands keep identities, keys and checkpoints, and the lock that keeps two processes out of one folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from swarm.errors import ConfigError

LOCK_NAME = "in-use"


def swarm_home() -> Path:
    """`$SWARM_HOME`, or `.swarm` in the user's home folder."""
    return Path(os.environ.get("SWARM_HOME") or Path.home() / ".swarm")


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Hold a data folder for this process.

    Two peers with one identity would displace each other in the run, so a second process is refused. The lock names its
    process; one left behind by a killed process is taken over.

    Raises:
        ConfigError: The folder cannot be written, or a living process uses it.
    """
    lock = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The data folder {folder} cannot be used: {error}", fix="Give another --data-dir."
        ) from error
    try:
        if (owner := _living_owner(lock)) is not None:
            raise ConfigError(
                f"{folder} is used by another swarm process ({owner}).",
                fix="Stop that process, or give this one another --data-dir.",
            )
        lock.unlink(missing_ok=True)
        with lock.open("x", encoding="ascii") as file:
            file.write(f"{os.getpid()} {psutil.Process().create_time()}")
    except FileExistsError as error:
        raise ConfigError(
            f"{folder} is being taken by another swarm process.", fix="Give this one another --data-dir."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"The data folder {folder} cannot be used: {error}", fix="Give another --data-dir."
        ) from error
    try:
        yield folder
    finally:
        lock.unlink(missing_ok=True)


def _living_owner(lock: Path) -> int | None:
    try:
        pid, started = lock.read_text("ascii").split()
        process = psutil.Process(int(pid))
        alive = abs(process.create_time() - float(started)) < 2.0
    except (FileNotFoundError, ValueError, psutil.Error):
        return None
    return int(pid) if alive and int(pid) != os.getpid() else None
