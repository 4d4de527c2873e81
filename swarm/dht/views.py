"""Which network a peer is in: a few bytes that tell whether two peers see the same one.

A peer's own neighbourhood is the part of a network that it knows best, and anybody in the same network finds that
neighbourhood by a lookup. So a *view* is the beginnings of the ids of the peers nearest to its author: whoever reads it
looks the author's position up and compares. Where the lookup leads to none of those peers, reader and author live on
islands that do not know of each other. No position is special, so that no peer is asked more than others, and the size
does not grow with the network, as a digest of all members would.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.dht.routing import PeerNode

VIEW_PEERS = 8
"""Peers in a view. All of them leave within one round of upkeep only where most of the network does."""
PREFIX_BYTES = 4
MAX_VIEW_BYTES = VIEW_PEERS * PREFIX_BYTES


def encode_view(nearest: Iterable[PeerNode]) -> bytes:
    """The view of a peer with these neighbours, nearest first; empty if it knows nobody."""
    return b"".join(node.id[:PREFIX_BYTES] for node in list(nearest)[:VIEW_PEERS])


def is_view(view: object) -> bool:
    """Whether a value that anybody may have written is a view."""
    return isinstance(view, bytes) and len(view) <= MAX_VIEW_BYTES and len(view) % PREFIX_BYTES == 0


def disjoint(view: bytes, ours: Iterable[PeerNode]) -> bool:
    """Whether none of the peers in a view is among ours. An empty view says nothing.

    Args:
        view: Somebody's neighbours.
        ours: Whom a lookup of that position found, everybody that we know, and ourselves.
    """
    theirs = {view[i : i + PREFIX_BYTES] for i in range(0, len(view), PREFIX_BYTES)}
    return bool(theirs) and not any(node.id[:PREFIX_BYTES] in theirs for node in ours)
