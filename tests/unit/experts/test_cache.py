"""The forward cache."""

from __future__ import annotations

import torch

from swarm.experts.backend import KeptGraph
from swarm.experts.cache import CachedForward, ForwardCache, Key
from swarm.identity import PeerId

PEER = PeerId(bytes(32))


def key(i: int, uid: str = "ffn.0") -> Key:
    return PEER, uid, i.to_bytes(16, "big")


def entry(graph_bytes: int = 0) -> CachedForward:
    graph = KeptGraph([], [], 0) if graph_bytes else None
    return CachedForward([torch.zeros(25)], graph, graph_bytes)  # 100 bytes of inputs


def test_inputs_stay_for_a_retry_and_a_graph_serves_once() -> None:
    cache = ForwardCache(1000)
    cache.put(key(1), entry(50))
    assert cache.nbytes == 150
    first, second = cache.take(key(1)), cache.take(key(1))
    assert first is not None
    assert second is not None
    assert first[1] is not None
    assert second[1] is None
    assert first[0][0] is second[0][0]
    assert cache.nbytes == 100
    assert cache.take(key(2)) is None
    assert cache.take((PeerId(b"\1" * 32), "ffn.0", key(1)[2])) is None, "what belongs to somebody else"


def test_spent_entries_go_first_then_graphs_then_inputs() -> None:
    cache = ForwardCache(500)
    for i in range(3):
        cache.put(key(i), entry(50))
    cache.take(key(2))
    assert cache.nbytes == 400
    cache.put(key(3), entry(50))  # 550: the spent 2 goes
    assert cache.take(key(2)) is None
    cache.put(key(4), entry(50))  # 600: the graphs of 0 and 1 go
    assert cache.nbytes == 500
    assert cache.take(key(0))[1] is None  # type: ignore[index]
    cache.put(key(5), entry(50))
    cache.put(key(6), entry(50))
    cache.put(key(7), entry(50))
    assert cache.nbytes <= 500
    assert cache.take(key(0)) is None
    assert cache.take(key(7)) is not None


def test_what_is_too_large_is_not_kept() -> None:
    cache = ForwardCache(80)
    cache.put(key(1), entry())
    assert (len(cache), cache.nbytes) == (0, 0)


def test_new_weights_drop_the_graphs_of_their_expert_only() -> None:
    cache = ForwardCache(1000)
    cache.put(key(1, "a.0"), entry(50))
    cache.put(key(1, "b.0"), entry(50))
    cache.drop_graphs("a.0")
    assert cache.take(key(1, "a.0"))[1] is None  # type: ignore[index]
    assert cache.take(key(1, "b.0"))[1] is not None  # type: ignore[index]
    cache.drop_expert("a.0")
    assert cache.take(key(1, "a.0")) is None
    assert cache.nbytes == 100
    cache.put(key(1, "b.0"), entry())
    assert (len(cache), cache.nbytes) == (1, 100), "the same request again replaces the first"
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
