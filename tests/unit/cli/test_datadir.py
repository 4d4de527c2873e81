"""Where commands keep their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.cli.datadir import swarm_home


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    assert swarm_home() == tmp_path
    monkeypatch.delenv("SWARM_HOME")
    assert swarm_home() == Path.home() / ".swarm"
