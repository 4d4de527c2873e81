"""The lock that keeps two peers out of one data directory: they would have one identity and displace each other."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from swarm.errors import ConfigError

LOCK_NAME = "in-use"

_guard = threading.Lock()
_held: dict[Path, int] = {}
"""Folders that peers of this process hold, with its id: a forked child holds nothing."""


def check_free(folder: Path) -> None:
    """Make the folder and look whether a peer could take it now, without taking it.

    Raises:
        ConfigError: The folder cannot be written, or a peer of this or another living process uses it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        owner = _owner(folder.resolve())
    except OSError as error:
        raise _unusable(folder, error) from error
    if owner is not None:
        whose = "another peer of this process" if owner == os.getpid() else "another swarm process"
        raise ConfigError(
            f"The data directory {folder} is used by {whose} ({owner}).",
            fix="Close that peer, or give this one another data directory (data_dir, --data-dir).",
        )


class DataDirLock:
    """Holds a data directory for one peer until `release`, or until the process ends. A context manager.

    A file in the directory names the process; one left behind by a killed process is taken over.

    Raises:
        ConfigError: The folder cannot be written, or a peer of this or another living process uses it.
    """

    def __init__(self, folder: Path) -> None:
        with _guard:
            check_free(folder)
            self._folder = folder.resolve()
            file = self._folder / LOCK_NAME
            try:
                file.unlink(missing_ok=True)
                with file.open("x", encoding="ascii") as out:
                    out.write(f"{os.getpid()} {psutil.Process().create_time()}")
            except FileExistsError as error:
                raise ConfigError(
                    f"The data directory {folder} is being taken by another swarm process.",
                    fix="Give this peer another data directory (data_dir, --data-dir).",
                ) from error
            except OSError as error:
                raise _unusable(folder, error) from error
            self._pid = os.getpid()
            _held[self._folder] = self._pid
            self._released = False

    def release(self) -> None:
        """Let others take the directory. Idempotent."""
        with _guard:
            if not self._released and self._pid == os.getpid():
                del _held[self._folder]
                (self._folder / LOCK_NAME).unlink(missing_ok=True)
            self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _owner(folder: Path) -> int | None:
    """The living process that holds the folder."""
    try:
        pid, started = (folder / LOCK_NAME).read_text("ascii").split()
        if int(pid) == os.getpid():
            return int(pid) if _held.get(folder) == int(pid) else None
        process = psutil.Process(int(pid))
        alive = abs(process.create_time() - float(started)) < 2.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return int(pid)
    except (FileNotFoundError, ValueError, psutil.Error):
        return None
    return int(pid) if alive else None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"The data directory {folder} cannot be used: {error}",
        fix="Give another data directory (data_dir, --data-dir).",
    )
