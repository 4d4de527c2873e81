"""Sixteen DHT peers over gRPC in four processes, one of which is killed with its three peers while all are busy."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SURVIVORS = (5, 4, 4)
VICTIMS = 3
KEYS = 24
ROUNDS_AFTER = 3


class Process:
    """A child that runs some peers."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "error", "-m", "tests.integration.dht_peers"]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def send(self, *command: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()

    def answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def do(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def end(self) -> None:
        self.child.kill()
        self.child.wait(10)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.close()
        self.child.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[[], Process]]:
    started: list[Process] = []

    def make() -> Process:
        started.append(Process())
        return started[-1]

    yield make
    for process in started:
        process.end()


def wait_for(what: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_replicated_records_are_found_while_three_of_sixteen_peers_are_killed(start: Callable[[], Process]) -> None:
    survivors = [start() for _ in SURVIVORS]
    victim = start()
    first = survivors[0].do("start", SURVIVORS[0], [])
    for process, count in [*zip(survivors[1:], SURVIVORS[1:], strict=True), (victim, VICTIMS)]:
        process.send("start", count, first[:2])
    for process in [*survivors[1:], victim]:
        process.answer()
    everybody = sum(SURVIVORS) + VICTIMS
    wait_for(lambda: all(process.do("known") == everybody - 1 for process in [*survivors, victim]))

    keys = [f"key/{i}" for i in range(KEYS)]
    held: list[int] = []
    for i, process in enumerate([*survivors, victim]):
        held += process.do("put", keys[i :: len(survivors) + 1])
    assert min(held) == 5

    for i, process in enumerate(survivors):
        process.do("work", keys, f"more/{i}")
    wait_for(lambda: all(process.do("progress")["rounds"] > 0 for process in survivors))
    victim.child.kill()  # SIGKILL: three peers at once, in the middle of reads and writes
    before = [process.do("progress") for process in survivors]
    wait_for(
        lambda: all(
            process.do("progress")["rounds"] >= was["rounds"] + ROUNDS_AFTER
            for process, was in zip(survivors, before, strict=True)
        )
    )
    for process, was in zip(survivors, before, strict=True):
        done = process.do("stop")
        assert done["lost"] == []
        assert done["puts"] > was["puts"]
