"""Records of prefixes: what bodies say, what is refused, and that only what changed is written."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from swarm.config import PeerConfig
from swarm.dht.schemas import Schemas
from swarm.errors import MalformedFrameError, RecordRefusedError
from swarm.experts.prefixes import (
    PREFIX_SCHEMA,
    PREFIXES,
    PrefixAnnouncer,
    PrefixesNotAnnounced,
    PrefixRecord,
    prefix_bodies,
    prefix_key,
)
from swarm.experts.spec import ExpertGrid
from tests.dht_networks import network
from tests.support import MemoryWorld, deterministic_identity

GRID = ExpertGrid("ffn.[0:64].[0:64].[0:64]", "ffn")


def test_every_prefix_lists_what_comes_next_and_the_last_says_where_its_host_is() -> None:
    bodies = prefix_bodies(GRID, ["ffn.3.17.5", "ffn.3.2.9", "ffn.3.17.4"], ["a:1"], False, 4096)
    contact = {"addresses": ["a:1"], "leaving": False}
    assert bodies == {
        ("prefixes/ffn", "0"): {"next": [3]},
        ("prefixes/ffn.3", "0"): {"next": [2, 17]},
        ("prefixes/ffn.3.2", "0"): {"next": [9], **contact},
        ("prefixes/ffn.3.17", "0"): {"next": [4, 5], **contact},
    }


def test_lists_that_are_too_long_for_one_body_go_on_in_the_next() -> None:
    wide = ExpertGrid("wide.[0:1000000]", "ffn")
    addresses = [f"host-{i}.example.org:12345" for i in range(8)]
    bodies = prefix_bodies(wide, (f"wide.{i}" for i in range(998_000, 1_000_000)), addresses, True, 4096)
    assert len(bodies) > 2
    assert [sub for _, sub in bodies] == [str(i) for i in range(len(bodies))]
    assert all(len(msgpack.packb(body)) <= 4096 for body in bodies.values())
    listed = [c for body in bodies.values() for c in PrefixRecord.from_body(body).next]
    assert listed == list(range(998_000, 1_000_000))


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"next": 3},
        {"next": [-1]},
        {"next": [1 << 20]},
        {"next": [True]},
        {"next": list(range(4097))},
        {"next": [1], "addresses": "a:1"},
        {"next": [1], "leaving": 1},
    ],
)
def test_a_malformed_body_is_refused(body: Any) -> None:
    with pytest.raises(MalformedFrameError):
        PrefixRecord.from_body(body)


@pytest.mark.parametrize(
    ("key", "subkey"), [("prefixes/ffn.x", "0"), ("prefixes/", "0"), ("prefixes/ffn.01", "0"), ("prefixes/ffn", "a")]
)
def test_records_elsewhere_are_refused(key: str, subkey: str) -> None:
    schemas = Schemas()
    schemas.add(PREFIXES, PREFIX_SCHEMA)
    author = deterministic_identity("host").peer_id
    schemas.check(author, "prefixes/ffn.1", "0", {"next": [1]})
    with pytest.raises(RecordRefusedError):
        schemas.check(author, key, subkey, {"next": [1]})


def test_only_what_changed_is_written_and_what_is_over_is_deleted(memory_world: MemoryWorld) -> None:
    """In virtual time: counts messages."""

    async def main() -> None:
        host, other = await network(memory_world, 2, PeerConfig.preset("local"))
        announcer = PrefixAnnouncer(host, [GRID], 30.0)

        async def listed(*prefix: int) -> list[int]:
            entries = await other.dht.get(prefix_key("ffn", prefix), fresh=True)
            return [c for e in entries for c in PrefixRecord.from_body(e.body).next]

        await announcer.announce(["ffn.1.2.3", "ffn.1.2.4", "nop.1"], leaving=False)
        assert [await listed(), await listed(1), await listed(1, 2)] == [[1], [2], [3, 4]]
        before = host.dht.stats.messages
        await announcer.announce(["ffn.1.2.3", "ffn.1.2.4"], leaving=False)
        assert host.dht.stats.messages == before
        versions = {e.record_version for e in await other.dht.get("prefixes/ffn", fresh=True)}
        await announcer.announce(["ffn.1.2.4", "ffn.1.5.0"], leaving=False)
        assert [await listed(), await listed(1), await listed(1, 2), await listed(1, 5)] == [[1], [2, 5], [4], [0]]
        assert {e.record_version for e in await other.dht.get("prefixes/ffn", fresh=True)} == versions
        await announcer.announce(["ffn.1.5.0"], leaving=True)
        assert await listed(1, 2) == []
        [entry] = await other.dht.get("prefixes/ffn.1.5", fresh=True)
        assert PrefixRecord.from_body(entry.body) == PrefixRecord((0,), tuple(host.contact.addresses), True)
        await announcer.withdraw()
        assert [await listed(), await listed(1), await listed(1, 5)] == [[], [], []]
        assert host.runtime.events.count(PrefixesNotAnnounced) == 0

    memory_world.run(main)
