"""One data directory, one peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarm.datadir import LOCK_NAME, DataDirLock, check_free
from swarm.errors import ConfigError


def test_the_folder_is_made_and_freed(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with DataDirLock(folder) as lock:
        assert (folder / LOCK_NAME).exists()
    assert not (folder / LOCK_NAME).exists()
    with DataDirLock(folder):
        lock.release()  # of one that does not hold it any more
        assert (folder / LOCK_NAME).exists()


def test_another_living_process_keeps_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / LOCK_NAME).write_text(f"{child.pid} {psutil.Process(child.pid).create_time()}")
        for attempt in (DataDirLock, check_free):
            with pytest.raises(ConfigError, match=str(child.pid)) as caught:
                attempt(tmp_path)
            assert "--data-dir" in str(caught.value)
    finally:
        child.communicate(b"\n", timeout=30)
    check_free(tmp_path)
    DataDirLock(tmp_path).release()


def test_a_process_that_ended_without_being_waited_for_does_not_keep_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (tmp_path / LOCK_NAME).write_text(f"{child.pid} {psutil.Process(child.pid).create_time()}")
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    child.stdout.read()
    child.stdout.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    check_free(tmp_path)
    child.wait(30)


def test_another_peer_of_this_process_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with DataDirLock(tmp_path):
        for path in (tmp_path, tmp_path / "link"):
            for attempt in (DataDirLock, check_free):
                with pytest.raises(ConfigError, match=rf"this process \({os.getpid()}\)"):
                    attempt(path)
    check_free(tmp_path)


@pytest.mark.parametrize("left", ["", "garbage", "1 2 3", "99999999 5.0", f"{os.getppid()} 1.0", f"{os.getpid()} 1.0"])
def test_what_a_killed_process_left_is_taken_over(tmp_path: Path, left: str) -> None:
    (tmp_path / LOCK_NAME).write_text(left)
    with DataDirLock(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"{os.getpid()} ")


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        DataDirLock(tmp_path / "file")
