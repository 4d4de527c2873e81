"""`swarm create` and `swarm join` as people run them: real processes, one string between them, Ctrl-C at the end."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import swarm
from swarm.runs.invite import Ticket

PATIENCE_S = 60.0
RUN_TOML = """
name = "cli-test"
preset = "local"

[[experts]]
grid = "ffn.[0:2]"
module = "ffn"
config = { hid = 8 }
replicas = 1
"""


class Command:
    """A `swarm` process whose lines can be waited for."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = {**os.environ, "SWARM_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        # a group of its own, so that on Windows a Ctrl-Break reaches it and not us
        flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.cli.main", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            cwd=folder,
            creationflags=flags,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first new line that matches."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                line = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line matches {pattern!r} in:\n" + "\n".join(self.lines))
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def wait_for_kind(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first new JSON line of a kind with these fields."""
        while True:
            values: dict[str, Any] = json.loads(self.wait_for(rf'"kind": "{kind}"')[0] and self.lines[-1])
            if all(values.get(k) == v for k, v in fields.items()):
                return values

    def press_ctrl_c(self) -> None:
        self.process.send_signal(getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT))

    def end(self) -> int:
        """Wait for the process and read the rest of its lines."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        while (line := self._queue.get_nowait()) is not None:
            self.lines.append(line)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Command] = []

    def run(*arguments: str) -> Command:
        started.append(Command(tmp_path, *arguments))
        return started[-1]

    yield run
    for command in reversed(started):
        command.close()


@pytest.fixture
def run_file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML, "utf-8")
    return str(path)


@pytest.mark.timeout(180)
def test_create_join_call_and_leave(start: Any, run_file: str, tmp_path: Path) -> None:
    owner = start("create", run_file, "--json")
    created = owner.wait_for_kind("created")
    address, invites = created["addresses"][0], created["invites"]
    assert created["run"] == "cli-test"
    assert (tmp_path / "home" / "owner" / "cli-test" / "run_key.pem").exists()

    # two processes at once: a host, and somebody who wants the owner's port
    host = start("join", invites["host"], "--preset", "local", "--json")
    taken = start("create", run_file, "--data-dir", "elsewhere", "--port", address.rsplit(":", 1)[1], "--json")

    assert host.wait_for_kind("joined")["run_id"] == created["run_id"]
    host.wait_for_kind("status", state="ONLINE", experts=2)
    with swarm.join(invites["trainer"], role="trainer", config=swarm.PeerConfig.preset("local")) as trainer:
        trainer.wait_for_experts("ffn", timeout_s=PATIENCE_S)
        assert swarm.RemoteExpert(trainer, "ffn.0")(torch.ones(3, 8)).shape == (3, 8)
        looked_up = start("dht", "get", "experts/ffn", invites["monitor"], "--json")
        listed = start("dht", "peers", created["ticket"], "--data-dir", created["data_dir"])
        assert looked_up.wait_for_kind("entry")["key"] == "experts/ffn"
        assert looked_up.wait_for_kind("done")["entries"] == 1
        for role in ("bootstrap", "host", "trainer"):
            assert any(f"  {role}  ONLINE  " in line for line in listed.lines) or listed.wait_for(f"  {role}  ONLINE  ")
        listed.wait_for(r"^3 peers\.$")
        assert (looked_up.end(), listed.end()) == (0, 0)

    host.press_ctrl_c()
    assert host.end() == 0
    leaving = [json.loads(line) for line in host.lines][-3:]
    assert [line["kind"] for line in leaving] == ["state", "notice", "left"]
    assert "2 experts were not handed over" in leaving[1]["message"]
    assert taken.end() == 3
    assert json.loads(taken.lines[-1])["error"]["code"] == 2005
    assert not any("Traceback" in line for line in taken.lines)

    owner.press_ctrl_c()
    assert owner.end() == 0
    assert json.loads(owner.lines[-1])["kind"] == "left"
    late = start("join", invites["host"], "--preset", "local", "--json")
    unreachable = start("dht", "peers", invites["monitor"], "--timeout", "5")
    assert late.end() == 3
    error = json.loads(late.lines[-1])["error"]
    assert error["name"] == "BootstrapError"
    assert address in error["reasons"]
    assert unreachable.end() == 3
    assert "[E2002]" in unreachable.lines[-1]
    assert not any("Traceback" in line for line in late.lines)


@pytest.mark.timeout(180)
def test_plain_lines_and_a_run_that_continues(start: Any, run_file: str) -> None:
    owner = start("create", run_file)
    first = owner.wait_for(r"(swarmt1[a-z2-7]+)")[1]
    invite = owner.wait_for(r"swarm join (swarmi1[a-z2-7]+)  # monitor")[1]
    monitor = start("join", invite, "--preset", "local", "--name", "watcher")
    monitor.wait_for("No remote code runs here")
    monitor.wait_for("JOINING")
    monitor.wait_for("ONLINE")
    monitor.wait_for("Joined cli-test as watcher")
    again = start("join", invite, "--preset", "local")
    assert again.end() == 2
    assert "used by another swarm process" in again.lines[0]
    assert len(again.lines) == 1
    monitor.press_ctrl_c()
    assert monitor.end() == 0
    assert "Left cli-test" in monitor.lines[-1]
    owner.press_ctrl_c()
    assert owner.end() == 0

    owner = start("create", run_file)
    second = owner.wait_for(r"(swarmt1[a-z2-7]+)")[1]
    assert Ticket.decode(second).run_id == Ticket.decode(first).run_id
    assert Ticket.decode(second).bootstrap[0].peer_id == Ticket.decode(first).bootstrap[0].peer_id
