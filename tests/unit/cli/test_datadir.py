"""One data folder, one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from swarm.cli.datadir import LOCK_NAME, locked, swarm_home
from swarm.errors import ConfigError


def test_the_folder_is_made_and_freed(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with locked(folder) as held:
        assert held == folder
        assert (folder / LOCK_NAME).exists()
    assert not (folder / LOCK_NAME).exists()


def test_another_living_process_keeps_it(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / LOCK_NAME).write_text(f"{child.pid} {psutil.Process(child.pid).create_time()}")
        with pytest.raises(ConfigError, match=str(child.pid)) as caught, locked(tmp_path):
            pass
        assert "--data-dir" in str(caught.value)
    finally:
        child.communicate(b"\n", timeout=30)
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("left", ["", "garbage", "1 2 3", "99999999 5.0", f"{os.getppid()} 1.0"])
def test_what_a_killed_process_left_is_taken_over(tmp_path: Path, left: str) -> None:
    (tmp_path / LOCK_NAME).write_text(left)
    with locked(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text().startswith(f"{os.getpid()} ")


def test_it_is_freed_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"), locked(tmp_path / "file"):
        pass


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    assert swarm_home() == tmp_path
    monkeypatch.delenv("SWARM_HOME")
    assert swarm_home() == Path.home() / ".swarm"
