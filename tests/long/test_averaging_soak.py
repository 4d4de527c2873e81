"""Thousands of real rounds between four processes, a tenth of which meet a failure: memory and handles stay flat.

    pytest tests/long/test_averaging_soak.py -s

`SWARM_SOAK_ROUNDS` sets how many rounds (2,000). Members are killed in the middle of a round and started again, links
stall for longer than the group waits or lose all that passes while connections stay open, connections are reset, and
values are not finite.
"""

import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.simulation.local import LocalSwarm
from swarm.simulation.pytest_plugin import LocalSwarmFactory
from swarm.simulation.status import read_json_lines

ROUNDS = int(os.environ.get("SWARM_SOAK_ROUNDS", "2000"))
NUMEL = 64 * 1024  # 256 KiB
FAILURES = ("reset", "stall", "spoil", "half_open", "kill")
EVERY = 10  # rounds from one failure to the next
MIB = 1024 * 1024
MAY_GROW_BYTES, MAY_GROW_HANDLES = 12 * MIB, 12
CONFIG = {"averaging": {"matchmaking_s": 1.5, "round_timeout_s": 5.0, "chunk_timeout_s": 0.6}}


class Progress:
    """What one member has written so far."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> int:
        """How many rounds it has seen."""
        found, self._offset = read_json_lines(self.file, self._offset)
        self.lines.extend(found)
        return len(self.lines)


def fail(s: LocalSwarm, kind: str, rng: random.Random, folder: Path) -> None:
    """Do something to a member. The first one stays as it is, the last one is the one to be killed."""
    assert s.links is not None
    victim = f"trainer-{rng.randrange(1, 4)}"
    match kind:
        case "reset":
            s.links.reset(victim)
        case "stall":
            s.links.stall(victim, seconds=1.0)
        case "half_open":
            s.links.swallow(victim, seconds=1.0, direction=rng.choice(["up", "down", "both"]))
        case "spoil":
            (folder / f"{victim}.spoil").touch()
        case "kill":
            s.kill("trainer-3")
            s.restart("trainer-3")


@pytest.mark.timeout(7200)
def test_memory_and_handles_stay_flat_while_rounds_fail(local_swarm: LocalSwarmFactory, tmp_path: Path) -> None:
    rng, failures = random.Random(0), Counter[str]()
    begun = time.monotonic()
    with local_swarm(
        hosts=0,
        trainers=4,
        train="tests.long.soak_member:average_forever",
        train_args={"directory": str(tmp_path), "rounds": 10 * ROUNDS, "numel": NUMEL},
        links=True,
        config=CONFIG,
    ) as s:
        members = [Progress(tmp_path / f"{name}.jsonl") for name in s.names("trainer")]
        first, next_failure, stuck_since = members[0], EVERY, time.monotonic()
        seen = 0
        while (now_seen := first.read()) < ROUNDS:
            if now_seen > seen:
                seen, stuck_since = now_seen, time.monotonic()
            assert time.monotonic() - stuck_since < 60, f"no round ended for a minute after {seen} rounds"
            assert s.state("trainer-0") == "ready", s.logs("trainer-0")
            if seen >= next_failure:
                next_failure += EVERY
                time.sleep(rng.random() * 0.05)  # somewhere in a round
                kind = FAILURES[sum(failures.values()) % len(FAILURES)]
                fail(s, kind, rng, tmp_path)
                failures[kind] += 1
            time.sleep(0.005)
        for member in members:
            member.read()

    rounds = first.lines[:ROUNDS]
    averaged = [line for line in rounds if line["outcome"] == "Group"]
    whole = [line for line in averaged if line["members"] == 4 and not line["degraded"]]
    median_s = statistics.median(line["seconds"] for line in whole)
    print(
        f"\n{len(rounds)} rounds in {time.monotonic() - begun:.0f} s, {dict(failures)}; {len(averaged)} averaged, "
        f"{len(whole)} of them by all four and nothing missing, {median_s * 1e3:.0f} ms each"
    )
    grown = []
    for name, member in zip(("0", "1", "2"), members, strict=False):  # those that lived through all of it
        count, tenth = len(member.lines), len(member.lines) // 10
        early, late = member.lines[tenth : 2 * tenth], member.lines[count - tenth :]
        rss, handles, threads = (
            [statistics.median(line[what] for line in lines) for lines in (early, late)]
            for what in ("rss", "handles", "threads")
        )
        print(
            f"member {name}: {count} rounds, RSS {rss[0] / MIB:.1f} -> {rss[1] / MIB:.1f} MiB, "
            f"handles {handles[0]:.0f} -> {handles[1]:.0f}, threads {threads[0]:.0f} -> {threads[1]:.0f}"
        )
        grown.append((rss[1] - rss[0], handles[1] - handles[0]))
    assert sum(failures.values()) >= ROUNDS // EVERY * 0.8
    assert len(averaged) >= 0.8 * len(rounds)
    assert max(nbytes for nbytes, _ in grown) <= MAY_GROW_BYTES
    assert max(count for _, count in grown) <= MAY_GROW_HANDLES
