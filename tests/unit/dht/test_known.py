"""Remembered peers: whom to keep, whom to try, and the file that survives a restart."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swarm.dht.known import KnownPeers, read_known, write_known
from swarm.errors import ConfigError
from swarm.identity import PeerId
from swarm.net.transport import Contact
from tests.support import RUN_ID


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def contact(number: int, address: str | None = None) -> Contact:
    peer_id = PeerId(hashlib.sha256(f"known {number}".encode()).digest())
    return Contact(peer_id, (address or f"10.0.{number >> 8}.{number & 255}:7000",))


ME = contact(-1).peer_id


def known_peers(limit: int = 16) -> tuple[KnownPeers, Clock]:
    clock = Clock()
    return KnownPeers(ME, limit, 30.0, clock, random.Random(1)), clock


def nobody(peer_id: PeerId) -> bool:
    return False


def test_a_peer_that_fails_is_left_in_peace_for_longer_each_time_up_to_a_bound() -> None:
    known, clock = known_peers()
    known.met(contact(1))
    pauses = []
    for _ in range(8):
        assert known.due(4, nobody) == [contact(1)]
        known.failed(contact(1).peer_id)
        begun_s = clock.now_s
        while not known.due(4, nobody):
            clock.now_s += 1.0
        pauses.append(clock.now_s - begun_s)
    assert 15 <= pauses[0] <= 30
    assert 30 <= pauses[1] <= 60
    assert all(60 <= pause <= 120 for pause in pauses[2:])
    assert len(set(pauses[2:])) > 1  # not all peers come back at the same moment
    known.failed(contact(1).peer_id)
    assert known.due(4, nobody, patient=False) == [contact(1)]


def test_whoever_was_not_tried_for_longest_is_tried_first_and_nobody_in_the_table() -> None:
    known, clock = known_peers()
    for i in range(6):
        known.met(contact(i))
    first = known.due(3, nobody)
    for tried in first:
        known.failed(tried.peer_id)
    clock.now_s = 1000.0
    assert set(known.due(3, nobody)) == {contact(i) for i in range(6)} - set(first)
    assert set(known.due(9, lambda p: p in {c.peer_id for c in first})) == {contact(i) for i in range(6)} - set(first)


def test_memory_is_bounded_and_stays_spread_over_the_id_space() -> None:
    known, clock = known_peers(limit=64)
    for i in range(2000):
        clock.now_s = float(i)
        known.met(contact(i))
        known.met(contact(-1))
    assert len(known) == 64
    parts = Counter(c.peer_id.digest[0] >> 2 for c in known.due(1000, nobody))
    assert len(parts) >= 50
    assert max(parts.values()) <= 3


def test_a_crowd_in_one_part_of_the_id_space_displaces_itself() -> None:
    known, clock = known_peers(limit=32)
    everywhere = [contact(i) for i in range(16)]
    for c in everywhere:
        known.met(c)
    clock.now_s = 1.0
    crowd = [contact(i) for i in range(20_000) if contact(i).peer_id.digest[0] >> 2 == 5][:200]
    for c in crowd:
        known.met(c)
    kept = known.due(1000, nobody)
    assert set(everywhere) - set(crowd) <= set(kept)


def test_pinned_peers_stay_and_gain_addresses() -> None:
    known, _ = known_peers(limit=4)
    known.pin(contact(500, "10.9.9.9:1"))
    known.pin(contact(500, "10.9.9.9:2"))
    for i in range(100):
        known.met(contact(i))
    pinned = next(c for c in known.due(100, nobody) if c.peer_id == contact(500).peer_id)
    assert pinned.addresses == ("10.9.9.9:1", "10.9.9.9:2")


def test_the_best_are_recent_from_all_over_and_not_all_of_one_subnet() -> None:
    known, clock = known_peers(limit=256)
    for i in range(200):
        clock.now_s = float(i)
        known.met(contact(i, f"8.8.{i if i % 2 else 0}.{i}:7000"))
    best = known.best(40)
    assert len(best) == 40
    assert len({c.peer_id.digest[0] >> 2 for c in best}) >= 35
    assert sum(c.addresses[0].startswith("8.8.0.") for c in best) <= 4
    newest: dict[int, Contact] = {}
    for i in range(1, 200, 2):
        newest[contact(i).peer_id.digest[0] >> 2] = contact(i)
    assert sum(c.peer_id in {n.peer_id for n in newest.values()} for c in best) >= 30


def test_the_file_holds_what_was_written_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "known_peers.json"
    contacts = [contact(i) for i in range(5)]
    write_known(path, RUN_ID, contacts)
    assert read_known(path, RUN_ID, 99) == contacts
    assert read_known(path, RUN_ID, 2) == contacts[:2]
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_known(tmp_path / "none", RUN_ID, 9) == []
    with pytest.raises(ConfigError, match="another run"):
        read_known(path, bytes(32), 9)


def good() -> dict[str, Any]:
    return {
        "format": 1,
        "run_id": RUN_ID.hex(),
        "peers": [{"peer_id": str(contact(1).peer_id), "addresses": ["10.0.0.1:7000"]}],
    }


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[1, 2",
        b"[" * 100_000,
        b"7",
        json.dumps({**good(), "format": 2}).encode(),
        json.dumps({**good(), "peers": {}}).encode(),
        json.dumps({**good(), "peers": [7]}).encode(),
        json.dumps({**good(), "peers": [{"peer_id": "short", "addresses": ["10.0.0.1:1"]}]}).encode(),
        json.dumps({**good(), "peers": [{"peer_id": str(contact(1).peer_id), "addresses": []}]}).encode(),
        json.dumps({**good(), "peers": [{"peer_id": str(contact(1).peer_id), "addresses": ["nowhere"]}]}).encode(),
        json.dumps({**good(), "peers": [{"peer_id": str(contact(1).peer_id), "addresses": [7]}]}).encode(),
        json.dumps({**good(), "more": "x" * 300_000}).encode(),
    ],
)
def test_a_file_that_is_not_ours_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "known_peers.json"
    path.write_bytes(json.dumps(good()).encode())
    assert read_known(path, RUN_ID, 9)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be used"):
        read_known(path, RUN_ID, 9)
