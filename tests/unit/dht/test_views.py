"""Views of a network: a few bytes of neighbours."""

from __future__ import annotations

import hashlib

from swarm.dht.routing import PeerNode
from swarm.dht.views import MAX_VIEW_BYTES, VIEW_PEERS, disjoint, encode_view, is_view
from swarm.identity import PeerId
from swarm.net.transport import Contact


def node(number: int) -> PeerNode:
    return PeerNode(Contact(PeerId(hashlib.sha256(str(number).encode()).digest()), ("10.0.0.1:1",)))


def test_a_view_is_small_and_holds_the_nearest() -> None:
    view = encode_view(node(i) for i in range(50))
    assert len(view) == MAX_VIEW_BYTES == 32
    assert view == encode_view(node(i) for i in range(VIEW_PEERS))
    assert encode_view([]) == b""


def test_one_shared_peer_makes_one_network() -> None:
    view = encode_view(node(i) for i in range(8))
    assert not disjoint(view, [node(100), node(7)])
    assert disjoint(view, [node(i) for i in range(8, 200)])
    assert disjoint(view, [])


def test_a_peer_that_knows_nobody_says_nothing() -> None:
    assert not disjoint(b"", [node(1)])


def test_what_is_no_view() -> None:
    assert is_view(b"")
    assert is_view(bytes(4))
    for bad in (bytes(3), bytes(36), "text", None, bytearray(4)):
        assert not is_view(bad)
